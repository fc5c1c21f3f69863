"""Drawing in the playground: pictures appear, stop, compare, come back from history."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect

from serving.config import ServerConfig
from serving.keys import ApiKey
from tests.fakes import FakeService, wait_until
from tests.live import serving
from tests.web.conftest import Open, SlowService, Watch

PROMPT = "a red apple"
DONE = ".shot[data-status=done]"


def draw(page: Page, prompt: str = PROMPT, **fields: str) -> None:
    """Fill the form and press Enter in the prompt."""
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def finished(page: Page, count: int = 1) -> None:
    expect(page.locator("#pictures .shot")).to_have_count(count)
    expect(page.locator(DONE)).to_have_count(count)
    expect(page.locator("#draw")).to_be_visible()


def picture_of(http: str, **body: object) -> bytes:
    answer = httpx.post(f"{http}/v1/images/generations", json={"prompt": PROMPT} | body)
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


def saved(page: Page, tmp_path: Path, index: int = 0) -> tuple[str, bytes]:
    """Press the download button of a picture; name and bytes of the file."""
    with page.expect_download() as download:
        page.locator(".save").nth(index).click()
    path = tmp_path / "saved"
    download.value.save_as(path)
    return download.value.suggested_filename, path.read_bytes()


def test_enter_draws_the_picture_of_the_api(page: Page, url: str, tmp_path: Path) -> None:
    page.select_option("#policy", "dense")
    draw(page, seed="7")
    finished(page)
    image = page.locator(f"{DONE} img")
    expect(image).to_have_attribute("alt", "a red apple, seed 7, dense")
    assert image.evaluate("image => image.naturalWidth") == 32
    expect(page.locator("#status")).to_have_text(re.compile(r"Drawn in \d+\.\d s\."))
    expect(page.locator(".cost")).to_contain_text("tokens/s")
    expect(page.locator(".cost")).to_contain_text("of KV read")
    name, data = saved(page, tmp_path)
    assert name == "a-red-apple-7-dense.png"
    assert data == picture_of(url, seed=7, policy="dense")


def test_every_setting_reaches_the_picture(page: Page, url: str, tmp_path: Path) -> None:
    page.select_option("#policy", "streaming")
    page.click("#policy-fold summary")
    page.click("details:has(#temperature) summary")
    draw(
        page, seed="5", negative_prompt="a cat", guidance_scale="2.5", temperature="0.7",
        top_p="0.8", top_k="40", sparsity="0.7",
        **{"option-sink": "6"},
    )  # fmt: skip
    finished(page)
    wanted = {
        "seed": 5, "negative_prompt": "a cat", "guidance_scale": 2.5, "temperature": 0.7,
        "top_p": 0.8, "top_k": 40, "policy": "streaming", "sparsity": 0.7,
        "policy_options": {"sink": 6},
    }  # fmt: skip
    data = saved(page, tmp_path)[1]
    assert data == picture_of(url, **wanted)
    for name in wanted:
        if name != "policy":
            rest = {key: value for key, value in wanted.items() if key != name}
            assert data != picture_of(url, **{"seed": 6} | rest), name


def test_the_request_shown_is_the_request_made(page: Page, url: str, tmp_path: Path) -> None:
    page.select_option("#policy", "window")
    draw(page, prompt="someone's apple", seed="9", sparsity="0.75", n="2")
    finished(page, 2)
    page.click("#request-fold summary")
    text = page.locator("#request").text_content() or ""
    body = json.loads(text.split("-d '")[1].rstrip("'").replace("'\\''", "'"))
    assert body["n"] == 2
    answer = httpx.post(f"{url}/v1/images/generations", json=body).json()
    assert saved(page, tmp_path, 1)[1] == base64.b64decode(answer["data"][1]["b64_json"])


def test_partial_pictures_appear_before_the_end(page: Page, service: SlowService) -> None:
    service.pause = 0.03
    draw(page, seed="3")
    drawing = page.locator(".shot[data-status=drawing]")
    expect(drawing.locator("img")).to_be_visible()
    expect(drawing.locator("img")).to_have_attribute("alt", re.compile("^unfinished picture, "))
    expect(page.locator("#status")).to_have_text(re.compile(r"Drawing… (25|50) %"))
    first = drawing.locator("img").get_attribute("src")
    assert 0 < float(drawing.locator("progress").get_attribute("value") or 0) < 1
    service.pause = 0.0
    finished(page)
    assert page.locator(f"{DONE} img").get_attribute("src") != first
    expect(page.locator(f"{DONE} progress")).to_be_hidden()


def assert_stops(page: Page, service: SlowService, stop: Callable[[], None]) -> None:
    before = service.stats().images_aborted
    service.pause = 0.03
    draw(page)
    expect(page.locator(".shot[data-status=drawing]")).to_be_visible()
    stop()
    expect(page.locator(".shot[data-status=stopped]")).to_be_visible()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#draw")).to_be_visible()
    assert wait_until(lambda: service.stats().images_aborted == before + 1)
    expect(page.locator("#history button")).to_have_count(0)


def test_the_button_stops(page: Page, service: SlowService) -> None:
    assert_stops(page, service, lambda: page.click("#stop"))


def test_escape_stops(page: Page, service: SlowService) -> None:
    assert_stops(page, service, lambda: page.keyboard.press("Escape"))


def test_several_pictures_have_seeds_in_a_row(page: Page) -> None:
    draw(page, seed="20", n="3")
    finished(page, 3)
    assert page.locator(".seed").all_text_contents() == ["seed 20", "seed 21", "seed 22"]
    sources = {image.get_attribute("src") for image in page.locator(f"{DONE} img").all()}
    assert len(sources) == 3
    expect(page.locator("#status")).to_have_text("3 pictures drawn.")


def test_dice_and_random_seeds(page: Page) -> None:
    page.click("#dice")
    first = page.input_value("#seed")
    page.click("#dice")
    assert first.isdecimal() and page.input_value("#seed") != first
    page.fill("#seed", "")
    draw(page)
    finished(page)
    one = page.locator(".seed").text_content()
    draw(page)
    expect(page.locator("#history button")).to_have_count(2)
    assert page.locator(".seed").text_content() != one


def test_an_example_draws(page: Page) -> None:
    expect(page.locator("#empty")).to_be_visible()
    example = page.locator("#examples button").first
    text = example.text_content()
    example.click()
    finished(page)
    assert page.input_value("#prompt") == text
    expect(page.locator("#empty")).to_be_hidden()


def compare(page: Page, policy: str, sparsity: str) -> None:
    page.get_by_text("Compare with dense", exact=True).click()
    page.select_option("#policy", policy)
    draw(page, seed="11", sparsity=sparsity)
    finished(page, 2)


def test_compare_shows_both_and_what_they_cost(page: Page, url: str, tmp_path: Path) -> None:
    compare(page, "window", "0.9")
    assert page.locator("figcaption strong").all_text_contents() == ["dense", "window\xa090\xa0%"]
    assert page.locator(".seed").all_text_contents() == ["seed 11", "seed 11"]
    rows = page.locator(".costs tbody tr").all()
    names = [row.locator("th").text_content() for row in rows]
    assert names == ["Time", "Tokens/s", "Keys read", "KV read", "KV resident"]
    gains = [row.locator(".gain").text_content() or "" for row in rows]
    body = {"prompt": PROMPT, "seed": 11}
    dense, sparse = (
        httpx.post(f"{url}/v1/images/generations", json=body | policy).json()["bishop"][0]
        for policy in ({"policy": "dense"}, {"policy": "window", "sparsity": 0.9})
    )
    for gain, key in zip(gains[3:], ("kv_read_bytes", "kv_resident_bytes"), strict=True):
        assert gain == f"{dense[key] / sparse[key]:.2f}× less"
    assert saved(page, tmp_path, 0)[1] == picture_of(url, seed=11, policy="dense")
    sparse_bytes = picture_of(url, seed=11, policy="window", sparsity=0.9)
    assert saved(page, tmp_path, 1)[1] == sparse_bytes


def test_slider_and_difference(page: Page) -> None:
    compare(page, "window", "0.9")
    page.click("[data-view=slider]")
    expect(page.locator(".single img")).to_have_count(2)
    split = page.get_by_label(re.compile("dense left, window.* right"))
    for value, edge in (("0", "0%"), ("80", "80%")):
        split.fill(value)
        expect(page.locator(".over")).to_have_css("clip-path", f"inset(0px 0px 0px {edge})")
    page.click("[data-view=difference]")
    expect(page.locator(".single .hint")).to_have_text(
        re.compile(r"^\d+(\.\d)? % of the pixels differ, by \d+\.\d of 255 on average\.$")
    )
    brightness = """canvas => canvas.getContext("2d").getImageData(0, 0, 32, 32).data.reduce(
        (sum, value) => sum + value)"""
    dim = page.locator(".single canvas").evaluate(brightness)
    page.fill("#gain", "16")
    expect(page.locator("output[for=gain]")).to_have_text("16×")
    assert page.locator(".single canvas").evaluate(brightness) > dim
    page.click("[data-view=side]")
    expect(page.locator(".shot")).to_have_count(2)


def test_no_difference_is_told_as_such(page: Page) -> None:
    compare(page, "window", "0")
    page.click("[data-view=difference]")
    expect(page.locator(".single .hint")).to_have_text(
        "Both pictures are the same, pixel for pixel."
    )


def test_history_restores_settings_and_pictures(page: Page) -> None:
    page.select_option("#policy", "streaming")
    page.click("#policy-fold summary")
    draw(page, prompt="first", seed="1", sparsity="0.6", **{"option-sink": "6"})
    finished(page)
    first = page.locator(f"{DONE} img").get_attribute("src")
    page.get_by_text("Compare with dense", exact=True).click()
    page.select_option("#policy", "window")
    draw(page, prompt="second", seed="2")
    finished(page, 2)
    entries = page.locator("#history button")
    expect(entries).to_have_count(2)
    entries.nth(1).click()
    finished(page)
    assert page.locator(f"{DONE} img").get_attribute("src") == first
    fields = {"prompt": "first", "seed": "1", "sparsity": "0.6", "policy": "streaming",
              "option-sink": "6"}  # fmt: skip
    for name, value in fields.items():
        assert page.input_value(f"#{name}") == value, name
    expect(page.get_by_label("One policy")).to_be_checked()
    entries.nth(0).click()
    finished(page, 2)
    expect(page.get_by_label("Compare with dense")).to_be_checked()
    expect(page.locator(".costs")).to_be_visible()
    page.click("#clear-history")
    expect(page.locator("#history-section")).to_be_hidden()


def test_the_queue_is_told(page: Page, service: SlowService) -> None:
    expect(page.locator("#queue-text")).to_have_text("idle")
    service.pause = 0.03
    draw(page, n="2")
    expect(page.locator("#queue-text")).to_have_text("2 drawing")
    assert int(page.locator("#cache-meter").get_attribute("aria-valuenow") or -1) >= 0
    service.pause = 0.0
    finished(page, 2)
    expect(page.locator("#queue-text")).to_have_text("idle")


def test_a_server_that_asks_for_a_key(open_page: Open, watch: Watch) -> None:
    keys = (ApiKey(name="alice", digest=hashlib.sha256(b"sk-alice-1").digest()),)
    watch.refusals = True
    with serving(FakeService(), ServerConfig(keys=keys)) as home:
        watch.home = home
        page = open_page(home, ready="#key-field .field-error")
        message = page.locator("#key-field .field-error")
        expect(message).to_contain_text("Send a key of this server")
        expect(page.locator("#api_key")).to_be_focused()
        page.keyboard.type("sk-wrong-1")
        page.keyboard.press("Tab")
        expect(page.locator("body[data-ready]")).to_have_count(0)
        page.fill("#api_key", "sk-alice-1")
        page.keyboard.press("Tab")
        page.wait_for_selector("body[data-ready]")
        draw(page)
        finished(page)
        page.reload()
        page.wait_for_selector("body[data-ready]")
