"""``python -m robust_train.children.apprise_program``: send a notification through Apprise.

:mod:`.notifier` starts it as a process with a time limit. The message ``{"urls": […], "title": …,
"body": …}`` comes on standard input, so that no URL is in a command line. A failure is printed on
one line, which shows only the schemes of the URLs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys


def main() -> None:
    """Send the notification. The exit code is 0 if every URL accepted it."""
    message = json.load(sys.stdin)
    try:
        import apprise
    except ImportError:
        sys.exit("Apprise is not installed: pip install 'robust-train[notify]'")
    # Apprise may log parts of a URL.
    logging.disable(logging.CRITICAL)
    failed = []
    for number, url in enumerate(message["urls"], start=1):
        target = apprise.Apprise()
        is_sent = False
        with contextlib.suppress(Exception):
            is_sent = target.add(url) and bool(target.notify(message["body"], message["title"]))
        if not is_sent:
            scheme, separator, _ = url.partition("://")
            if not separator:
                scheme = "no scheme"
            failed.append(f"{scheme} (URL {number})")
    if failed:
        sys.exit(f"not delivered: {', '.join(failed)}")


if __name__ == "__main__":
    main()
