"""Build the site from the repository's own pages: a hook of MkDocs.

README and the other pages of the repository's root become pages of the site. A link to a file that
is no page leads to the repository, ``Source`` in ``[project.urls]``, and is plain text without it.
``llms.txt`` lists the pages for programs that read Markdown.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure import StructureItem
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "gallery.md",
    "examples/nanogpt_like/README.md": "gallery-nanogpt.md",
    "examples/yolo_like/README.md": "gallery-yolo.md",
    "examples/transformers_sonnets/README.md": "gallery-transformers.md",
    "examples/lightning_digits/README.md": "gallery-lightning.md",
}
_nav: list[Navigation] = []
_FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]+`")
_ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):<code>[~.]*(?:[a-z_]+\.)*([^<]*)")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions by number."""
    listed = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("0*.md"))
    assert config.nav is not None
    *_, made = config.nav
    *_, decisions = made["How it is made"]
    decisions["Decisions"][1:] = [{_title(name): f"decisions/{name}"} for name in listed]
    return config


def _title(decision: str) -> str:
    """Return a decision's title, without its number."""
    first, *_ = (ROOT / "docs" / "decisions" / decision).read_text().splitlines()
    return re.sub(r"^# (\d+[.:]? )?", "", first)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn a page's links, which are right in the repository, into those of the site."""
    names = {site: name for name, site in PAGES.items()}
    path = names.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    kept: list[str] = []

    def keep(fence: re.Match[str]) -> str:
        kept.append(fence[0])
        return f"\0{len(kept) - 1}\0"

    text = _LINK.sub(lambda link: _of_the_site(link, path), _FENCE.sub(keep, markdown))
    # in a table GitHub wants a backslash before it, and other pages show that
    text = _CODE.sub(lambda code: code[0].replace("\\|", "|"), text)
    return re.sub("\0(\\d+)\0", lambda number: kept[int(number[1])], text)


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Keep the navigation for ``llms.txt``."""
    _nav.append(nav)
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write ``llms.txt``: each section's pages, with the sentence that says whom they are for."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}."]
    for item in _nav[-1].items:
        pages = [page for page in _pages_of(item) if page.markdown]
        lines += ["", f"## {item.title}", ""]
        lines += [f"- [{page.title}]({page.url}){_purpose(page)}" for page in pages]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def _pages_of(item: StructureItem) -> list[Page]:
    if isinstance(item, Page):
        return [item]
    return [page for child in item.children or () for page in _pages_of(child)]


def _purpose(page: Page) -> str:
    """Return the first sentence below a page's title."""
    _, *paragraphs = str(page.markdown).split("\n\n")
    first = " ".join(paragraphs[0].split()) if paragraphs else ""
    if not first[:1].isalpha():
        return ""
    # a link would lead to a page's source
    sentence, *_ = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first).split(". ")
    return f": {sentence.removesuffix('.')}"


def on_page_content(html: str, **_: Any) -> str:
    """Show the marks of our docstrings, which are reStructuredText, as what they mean."""
    html = _ROLE.sub(r"<code>\1", html)
    return html.replace("::</p>", ":</p>")


def _of_the_site(link: re.Match[str], page: str) -> str:
    picture, text, target, anchor = link.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if path.startswith("docs/") or path in PAGES:
        here = PAGES.get(page) or page.removeprefix("docs/")
        there = PAGES.get(path) or path.removeprefix("docs/")
        target = posixpath.relpath(there, posixpath.dirname(here) or ".")
        return f"{picture}[{text}]({target}{anchor or ''})"
    if not os.path.lexists(ROOT / path):
        return link[0]  # a dead link, which the strict build refuses
    project = (ROOT / "pyproject.toml").read_text()
    source = re.search(r'^Source = "(.+)"$', project, re.M)
    return f"[{text}]({source[1]}/blob/HEAD/{path})" if source else text
