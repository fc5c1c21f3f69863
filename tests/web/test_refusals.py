"""Bad input is shown in plain words at its field; a lost server too."""

import pytest
from playwright.sync_api import Page, expect

from tests.web.conftest import Watch
from tests.web.test_drawing import draw, finished

NOTHING_TO_COMPARE = "Choose a sparse policy to compare with dense."

REFUSED = [
    ("prompt", {"prompt": "  "}, "Say what to draw."),
    ("prompt", {"prompt": "word " * 31}, "at most 30: shorten it"),
    ("seed", {"seed": "-5"}, "Must be greater than or equal to 0"),
    ("seed", {"seed": "1.5"}, "whole number"),
    ("seed", {"seed": "99999999999999999999"}, "up to 9007199254740991"),
    ("n", {"n": "11"}, "1 to 10"),
    ("n", {"n": "0"}, "1 to 10"),
    ("guidance_scale", {"guidance_scale": "0.5"}, "Must be greater than or equal to 1"),
    ("temperature", {"temperature": "-1"}, "Must be greater than or equal to 0"),
    ("top_p", {"top_p": "1.5"}, "Must be less than or equal to 1"),
    ("negative_prompt", {"negative_prompt": "a", "guidance_scale": "1"}, "has no effect"),
    ("sparsity", {"sparsity": "1"}, "Must be less than 1"),
    ("option-sink", {"option-sink": "many"}, "must be of type int"),
    ("policy", {"option-sink": "-3"}, "at least 1 sink"),
]


def open_folds(page: Page) -> None:
    page.select_option("#policy", "streaming")
    page.click("#policy-fold summary")
    page.click("details:has(#temperature) summary")


@pytest.fixture
def form(page: Page, watch: Watch) -> Page:
    watch.refusals = True
    open_folds(page)
    return page


def test_each_is_told_at_its_field(form: Page) -> None:
    ids = {id for _, fields, _ in REFUSED for id in fields} - {"prompt"}
    right = {id: form.input_value(f"#{id}") for id in ids}
    for name, fields, message in REFUSED:
        draw(form, **{"prompt": "an apple", **fields})  # type: ignore[arg-type]
        field = form.locator(f".field:has(> #{name}, > * > #{name})")
        expect(field.locator(".field-error"), f"{name} {fields}").to_contain_text(message)
        expect(form.locator(".field-error")).to_have_count(1)
        expect(form.locator(f"#{name}")).to_be_focused()
        expect(form.locator(f"#{name}")).to_have_attribute("aria-invalid", "true")
        told = form.locator(f"#{name}").get_attribute("aria-describedby") or ""
        assert f"{name}-error" in told.split()
        for id, value in right.items():
            form.fill(f"#{id}", value)


def test_a_message_goes_when_the_input_is_right(form: Page) -> None:
    draw(form, seed="-5")
    expect(form.locator(".field-error")).to_have_count(1)
    draw(form, seed="5")
    finished(form)
    expect(form.locator(".field-error, [aria-invalid]")).to_have_count(0)


def test_a_refusal_leaves_the_stage_as_it_was(form: Page) -> None:
    draw(form, seed="-5")
    expect(form.locator(".field-error")).to_have_count(1)
    expect(form.locator("#empty")).to_be_visible()
    draw(form, seed="5")
    finished(form)
    draw(form, seed="-5")
    expect(form.locator(".field-error")).to_have_count(1)
    finished(form)
    expect(form.locator(".seed")).to_have_text("seed 5")


def test_a_field_in_a_fold_is_opened(page: Page, watch: Watch) -> None:
    watch.refusals = True
    page.evaluate("document.getElementById('top_p').value = '2'")
    draw(page)
    expect(page.locator("#top_p")).to_be_focused()


def test_dense_is_not_compared_with_dense(page: Page) -> None:
    page.get_by_text("Compare with dense", exact=True).click()
    page.select_option("#policy", "dense")
    draw(page)
    expect(page.locator(".field-error")).to_have_text(
        "Choose a sparse policy to compare with dense."
    )


def test_a_server_that_is_gone(page: Page, watch: Watch) -> None:
    watch.refusals = True
    page.route("**/v1/**", lambda route: route.abort())
    draw(page)
    expect(page.locator("#form-error")).to_have_text(
        "The server cannot be reached. Is it still running?"
    )
    expect(page.locator("#queue-text")).to_have_text("no answer")
    page.unroute("**/v1/**")
    draw(page)
    finished(page)
    expect(page.locator("#form-error")).to_be_hidden()
