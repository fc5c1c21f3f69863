"""The documents name only what exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md", ROOT / "training" / "README.md", ROOT / "assets" / "mini" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
TARGET = re.compile(r"`make ([a-z-]+)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = LINK.findall(path.read_text(encoding="utf-8"))
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    named = TARGET.findall(path.read_text(encoding="utf-8"))
    assert not set(named) - set(rules)
