"""The playground in a real browser, against a real server that draws with `tiny`."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

from engine.config import EngineConfig
from engine.service import EngineService
from tests.live import serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs the test extra: playwright")
pytest.importorskip("axe_playwright_python", reason="needs the test extra: axe-playwright-python")

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 860}


class SlowService(EngineService):
    """The engine, with a pause before each step that tests may set."""

    pause = 0.0

    def __init__(self) -> None:
        super().__init__(EngineConfig("tiny", threads=1))
        step = self._engine.step

        def slow() -> bool:
            time.sleep(self.pause)
            return step()

        self._engine.step = slow  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def running() -> Iterator[tuple[SlowService, str]]:
    service = SlowService()
    with serving(service) as url:
        yield service, url


@pytest.fixture
def service(running: tuple[SlowService, str]) -> Iterator[SlowService]:
    yield running[0]
    running[0].pause = 0.0


@pytest.fixture(scope="session")
def url(running: tuple[SlowService, str]) -> str:
    return running[1]


@pytest.fixture(scope="package")  # its event loop would be in the way of other tests
def browser() -> Iterator["playwright.Browser"]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        yield chromium
        chromium.close()


@dataclass
class Watch:
    """What a page did that nobody saw. `refusals`: the test expects the server to refuse."""

    home: str
    foreign: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    refusals: bool = False

    def follow(self, page: "playwright.Page") -> None:
        page.on("request", lambda request: self._request(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._console(message.type, message.text))

    def _request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "blob" and f"{parts.scheme}://{parts.netloc}" != self.home:
            self.foreign.append(url)

    def _console(self, kind: str, text: str) -> None:
        refused = self.refusals and text.startswith("Failed to load resource")
        ours = text.startswith("Canvas2D: Multiple readback")  # the tests look at the pixels
        if kind in ("error", "warning") and not refused and not ours:
            self.complaints.append(text)


@pytest.fixture
def watch(url: str) -> Iterator[Watch]:
    """Holds for every test: no request leaves the server, and the console stays empty."""
    watching = Watch(url)
    yield watching
    assert not watching.foreign
    assert not watching.complaints


Open = Callable[..., "playwright.Page"]


@pytest.fixture
def open_page(browser: "playwright.Browser", url: str, watch: Watch) -> Iterator[Open]:
    contexts = []

    def open_page(
        home: str = url, ready: str = "body[data-ready]", **settings: object
    ) -> "playwright.Page":
        context = browser.new_context(**{"viewport": DESKTOP} | settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        watch.follow(page)
        page.goto(home)
        page.wait_for_selector(ready)
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def page(open_page: Open) -> "playwright.Page":
    return open_page()
