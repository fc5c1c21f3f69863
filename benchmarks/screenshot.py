"""docs/images/playground.png: the playground with `mini`, dense and sparse of one seed.

    python -m benchmarks.screenshot

Needs the test extra (playwright) and Chromium.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "images" / "playground.png"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LIMIT = 300_000
START_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="a cat face 3d style on a blue background")
    parser.add_argument("--seed", default="4")
    parser.add_argument("--policy", default="stencil")
    parser.add_argument("--sparsity", default="0.8")
    wanted = parser.parse_args()
    with server() as url, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1360, "height": 1010})
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        compare(page, wanted)
        page.screenshot(path=TARGET)
        browser.close()
    size = TARGET.stat().st_size
    if size > LIMIT:
        sys.exit(f"{TARGET} has {size} bytes, more than {LIMIT}")
    print(f"{TARGET.relative_to(ROOT)}: {size} bytes")


def compare(page: Page, wanted: argparse.Namespace) -> None:
    """Draw both pictures and show what the policy reads."""
    page.get_by_text("Compare with dense", exact=True).click()
    page.select_option("#policy", wanted.policy)
    page.fill("#sparsity", wanted.sparsity)
    page.fill("#seed", wanted.seed)
    page.fill("#prompt", wanted.prompt)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#history button", timeout=120_000)
    page.click("#reads-toggle")
    page.wait_for_selector(".overlay:visible")
    page.wait_for_timeout(500)


@contextmanager
def server() -> Iterator[str]:
    """The address of `bishop serve` with mini, ready to draw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "server.py", "--port", url.rsplit(":", 1)[1]]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(f"{url}/ready", process)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urlopen(url).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    sys.exit("the server did not start")


if __name__ == "__main__":
    main()
