"""README as the page of the package: its links and pictures are absolute there.

The build calls it. Without ``Source`` in ``[project.urls]`` there is nothing to link to: what links
to a file of the repository is then plain text, and its pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_TO_A_FILE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


class PackagePage(MetadataHookInterface):
    """Gives the package its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``."""
        source = metadata.get("urls", {}).get("Source", "").rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(readme, source, f"v{metadata['version']}"),
        }


def absolute(page: str, source: str, tag: str) -> str:
    """Return a page of the repository's root whose links to its files lead to ``source``."""

    def link(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if not source:
            return "" if picture else text
        return f"{picture}[{text}]({source}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return _TO_A_FILE.sub(link, page)
