"""The read set drawn over the picture."""

import re
from typing import Any

import httpx
from playwright.sync_api import Page, expect

from tests.web.test_drawing import compare, draw, finished

COUNTS = re.compile(r"Reads (\d+) of (\d+) visual keys \(.*\), (\d+) stored")


def counts(page: Page) -> tuple[int, int, int]:
    found = COUNTS.search(page.locator("#reads-sum").text_content() or "")
    assert found
    return int(found[1]), int(found[2]), int(found[3])


def size(runs: list[list[int]]) -> int:
    return sum(last - first + 1 for first, last in runs)


def place(page: Page, **values: int) -> None:
    for name, value in values.items():
        page.fill(f"#{name}", str(value))


def colour(page: Page, row: int, column: int) -> list[int]:
    """RGBA at the middle of a cell of the overlay that is shown."""
    script = """(canvas, [row, column]) => [...canvas.getContext("2d").getImageData(
        (column + 0.5) * canvas.width / 8, (row + 0.5) * canvas.height / 8, 1, 1).data]"""
    found: list[int] = page.locator(".overlay:visible").evaluate(script, [row, column])
    return found


def test_before_anything_is_drawn(page: Page, url: str) -> None:
    page.select_option("#policy", "window")
    page.fill("#sparsity", "0.8")
    page.click("#reads-toggle")
    expect(page.locator("#empty")).to_be_hidden()
    place(page, position=40, layer=1, head=1)
    expect(page.locator("#reads-sum")).to_contain_text("of 41 visual keys")
    query = {"policy": "window", "sparsity": 0.8, "position": 40, "layer": 1, "head": 1}
    answer: Any = httpx.post(f"{url}/v1/bishop/read_set", json=query).json()
    assert counts(page) == (size(answer["reads"]), 41, size(answer["resident"]))
    expect(page.locator("#position-value")).to_have_text("40 (row 5, column 0)")
    read, gone, future = colour(page, 4, 7), colour(page, 0, 0), colour(page, 7, 0)
    assert len({tuple(read), tuple(gone), tuple(future)}) == 3
    page.click("#reads-toggle")
    expect(page.locator("#empty")).to_be_visible()


def test_sliders_and_policy_change_what_is_shown(page: Page) -> None:
    page.select_option("#policy", "window")
    page.click("#reads-toggle")
    place(page, position=62)
    page.fill("#sparsity", "0.9")
    expect(page.locator("#reads-sum")).to_contain_text("Reads 7 of 63")
    page.fill("#sparsity", "0.5")
    expect(page.locator("#reads-sum")).to_contain_text("Reads 32 of 63")
    place(page, position=9)
    expect(page.locator("#reads-sum")).to_contain_text("Reads 10 of 10")
    page.select_option("#policy", "dense")
    place(page, position=50)
    expect(page.locator("#reads-sum")).to_contain_text("Reads 51 of 51 visual keys (100 %)")


def test_a_click_on_the_picture_takes_its_position(page: Page) -> None:
    page.select_option("#policy", "window")
    draw(page)
    finished(page)
    page.click("#reads-toggle")
    overlay = page.locator(".overlay:visible")
    expect(overlay).to_have_count(1)
    box = overlay.bounding_box()
    assert box
    place_in = {"x": box["width"] * 3.5 / 8, "y": box["height"] * 2.5 / 8}
    overlay.click(position=place_in)  # type: ignore[arg-type]
    expect(page.locator("#position-value")).to_have_text("19 (row 2, column 3)")
    expect(page.locator("#reads-sum")).to_contain_text("of 20 visual keys")


def test_a_policy_that_learns_shows_what_it_learnt(page: Page, url: str) -> None:
    page.select_option("#policy", "diagonal")
    page.click("#reads-toggle")
    expect(page.locator("#reads-note")).to_contain_text("learnt while a picture is drawn")
    draw(page, seed="4")
    finished(page)
    expect(page.locator("#reads-note")).to_contain_text("learnt these reads while it drew")
    page.fill("#sparsity", "0.7")
    expect(page.locator("#reads-note")).to_contain_text("learnt while a picture is drawn")


def test_in_a_comparison_the_sparse_picture_is_painted(page: Page) -> None:
    compare(page, "window", "0.9")
    page.click("#reads-toggle")
    expect(page.locator(".shot:nth-child(2) .overlay")).to_be_visible()
    expect(page.locator(".shot:nth-child(1) .overlay")).to_be_hidden()


def test_a_policy_that_cannot_be_says_why(page: Page, watch: Any) -> None:
    watch.refusals = True
    page.select_option("#policy", "streaming")
    page.click("#policy-fold summary")
    page.click("#reads-toggle")
    expect(page.locator("#reads-sum")).to_contain_text("Reads")
    page.fill("#option-sink", "-1")
    expect(page.locator("#reads-note")).to_contain_text("Not to be shown: streaming needs")
    expect(page.locator("#reads-sum")).to_have_text("")
