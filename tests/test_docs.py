"""README and docs: links resolve, code compiles, README stays short."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)


def _prose(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "code", _FENCE.sub("", page.read_text()))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", a) is not None for a in anchors)
        anchors.add(f"{slug}-{repeated}" if repeated else slug)
    return anchors


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_and_anchor_resolves(page: Path):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_python_block_compiles(page: Path):
    for language, code in _FENCE.findall(page.read_text()):
        if language == "python":
            # a snippet may show the inside of a function
            inside = f"def snippet():\n{textwrap.indent(textwrap.dedent(code), '    ')}"
            try:
                ast.parse(textwrap.dedent(code))
            except SyntaxError:
                ast.parse(inside)


def test_readme_has_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
