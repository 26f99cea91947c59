"""A process of its own that sends one notification through Apprise.

``{"urls": […], "title": …, "body": …}`` comes on standard input, so that no URL is in a command
line. What failed is printed in one line, by the URLs' schemes.
"""

from __future__ import annotations

import json
import logging
import sys


def main() -> None:
    """Send it; the exit code is 0 if every URL took it."""
    given = json.load(sys.stdin)
    try:
        import apprise
    except ImportError:
        sys.exit("Apprise is not installed: pip install 'robust-train[notify]'")
    logging.disable(logging.CRITICAL)  # its lines may name parts of a URL
    failed = []
    for number, url in enumerate(given["urls"], start=1):
        try:
            target = apprise.Apprise()
            sent = target.add(url) and target.notify(
                title=given["title"], body=given["body"]
            )
        except Exception:
            sent = False
        if not sent:
            scheme, separator, _ = url.partition("://")
            failed.append(f"{scheme if separator else 'no scheme'} (URL {number})")
    if failed:
        sys.exit(f"not delivered: {', '.join(failed)}")


if __name__ == "__main__":
    main()
