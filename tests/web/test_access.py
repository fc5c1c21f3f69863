"""For everyone: keyboard alone, screen readers, contrast, phones, less motion."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.web.conftest import PHONE, Open, Watch
from tests.web.test_drawing import PROMPT, compare, draw, finished

EVERYTHING = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
COLOURS = ["color-contrast"]


def violations(page: Page, rules: Sequence[str] = EVERYTHING) -> list[str]:
    results = Axe().run(page, options={"runOnly": list(rules)})
    return [
        f"{found['id']}: {node['target']} {node.get('failureSummary', '')}"
        for found in results.response["violations"]
        for node in found["nodes"]
    ]


def look_everywhere(page: Page, watch: Watch, check: Any) -> None:
    """Call `check` in every state of the page that differs in what it shows."""
    check("empty")
    page.click("#policy-fold summary")
    page.click("#request-fold summary")
    page.click("details:has(#temperature) summary")
    check("folds open")
    draw(page, n="2")
    finished(page, 2)
    check("drawn")
    compare(page, "window", "0.9")
    page.click("#reads-toggle")
    expect(page.locator("#reads-sum")).to_contain_text("Reads")
    check("compared, with reads")
    page.click("[data-view=slider]")
    check("slider")
    page.click("[data-view=difference]")
    check("difference")
    watch.refusals = True
    draw(page, seed="-1")
    expect(page.locator(".field-error")).to_be_visible()
    check("refused")


@pytest.mark.parametrize(("scheme", "rules"), [("light", EVERYTHING), ("dark", COLOURS)])
def test_axe_finds_nothing(
    open_page: Open, watch: Watch, scheme: str, rules: Sequence[str]
) -> None:
    page = open_page(color_scheme=scheme, reduced_motion="reduce")

    def check(state: str) -> None:
        assert violations(page, rules) == [], state

    look_everywhere(page, watch, check)


def test_a_phone_never_scrolls_sideways(open_page: Open, watch: Watch) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True, reduced_motion="reduce")

    def check(state: str) -> None:
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], state

    look_everywhere(page, watch, check)
    assert violations(page) == []


def focused(page: Page) -> str:
    found: str = page.evaluate("document.activeElement.id || document.activeElement.className")
    return found


def tab_to(page: Page, id: str) -> None:
    for _ in range(60):
        if focused(page) == id:
            return
        page.keyboard.press("Tab")
    pytest.fail(f"Tab never reaches {id}")


def test_the_keyboard_is_enough(page: Page) -> None:
    assert focused(page) == "prompt"
    page.keyboard.type(PROMPT)
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("on a table")
    assert page.input_value("#prompt") == f"{PROMPT}\non a table"
    page.keyboard.press("Enter")
    finished(page)
    tab_to(page, "policy")
    page.keyboard.type("window")
    tab_to(page, "sparsity")
    page.keyboard.press("Control+A")
    page.keyboard.type("0.9")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#history button")).to_have_count(2)
    tab_to(page, "reads-toggle")
    page.keyboard.press("Space")
    expect(page.locator("#reads")).to_be_visible()
    tab_to(page, "position")
    page.keyboard.press("Home")
    expect(page.locator("#reads-sum")).to_contain_text("Reads 1 of 1")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#reads-sum")).to_contain_text("Reads 2 of 2")


def test_arrows_move_in_the_history(page: Page) -> None:
    for seed in ("1", "2", "3"):
        draw(page, seed=seed)
        expect(page.locator("#history button")).to_have_count(int(seed))
    tab_to(page, "clear-history")
    page.keyboard.press("Tab")
    entries = page.locator("#history button")
    expect(entries.nth(0)).to_be_focused()
    for key, at in (("ArrowRight", 1), ("End", 2), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        expect(entries.nth(at)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".seed")).to_have_text("seed 2")
    assert page.input_value("#seed") == "2"
    entries.nth(1).focus()
    page.keyboard.press("Delete")
    expect(entries).to_have_count(2)
    expect(entries.nth(1)).to_be_focused()


def test_what_has_the_focus_is_seen(page: Page) -> None:
    page.keyboard.press("Tab")
    seen = set()
    for _ in range(25):
        outline = page.evaluate("""() => {
            const at = document.activeElement, box = at.closest("label") ?? at;
            const style = getComputedStyle(box);
            return [at.id || at.className || at.tagName, style.outlineStyle, style.outlineWidth];
        }""")
        if outline[0] != "BODY":
            assert outline[1] != "none" and outline[2] != "0px", outline
        seen.add(outline[0])
        page.keyboard.press("Tab")
    assert {"draw", "policy", "seed", "dice", "reads-toggle"} <= seen


def test_progress_and_results_are_read_out(page: Page) -> None:
    expect(page.locator("#status")).to_have_attribute("role", "status")
    draw(page, n="2", seed="8")
    labels = page.locator("progress").evaluate_all("all => all.map(p => p.ariaLabel)")
    assert all(label.startswith("Progress of ") for label in labels)
    finished(page, 2)
    for image in page.locator("#pictures img").all():
        assert (image.get_attribute("alt") or "").startswith(f"{PROMPT}, seed ")


def background(page: Page) -> str:
    found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_colours_follow_the_system_and_the_choice(open_page: Open) -> None:
    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    assert background(light) != background(dark)
    at_night = background(dark)
    light.click("#theme")
    light.click("#theme")
    expect(light.locator("#theme-text")).to_have_text("Colours: dark")
    assert background(light) == at_night
    light.reload()
    light.wait_for_selector("body[data-ready]")
    assert background(light) == at_night
    light.click("#theme")
    expect(light.locator("#theme-text")).to_have_text("Colours: as the system")
    assert background(light) != at_night


def test_less_motion(open_page: Open) -> None:
    moving, still = open_page(), open_page(reduced_motion="reduce")
    script = "getComputedStyle(document.querySelector('#draw')).transitionDuration"
    assert re.search(r"[1-9]", moving.evaluate(script))
    assert still.evaluate(script) == "0s"
