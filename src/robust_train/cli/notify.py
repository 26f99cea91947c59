"""``robust-train notify test``: send one notification, and see whether it comes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from robust_train.cli.output import EXIT_NOT_DONE, Parser, fail
from robust_train.errors import EXIT_BAD_CONFIG
from robust_train.gpu.processes import user_name
from robust_train.runfolder.notifier import URLS_VARIABLE, Notifier

_SECONDS = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Send a notification as a job with these keys would; return 0 if every delivery succeeds."""
    about = f"Send one notification, as a job with the same keys and ${URLS_VARIABLE} would."
    parser = Parser(prog="robust-train notify", description=about)
    parser.add_argument("what", choices=["test"])
    keys = "notify.command=… and notify.urls=…"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=keys)
    overrides = parser.parse_args(argv).overrides

    from robust_train.config.refusals import REFUSALS, composed, explain
    from robust_train.settings import take_notify_settings

    try:
        settings = take_notify_settings(composed(overrides))
    except REFUSALS as error:
        problem = explain(error, "robust", overrides)
        return fail("notify test", problem, code=EXIT_BAD_CONFIG)
    if not (settings.command or settings.urls):
        nobody = f"nobody to notify; give notify.command=…, notify.urls=… or ${URLS_VARIABLE}"
        return fail("notify test", nobody, code=EXIT_BAD_CONFIG)
    host, user = socket.gethostname(), user_name(os.geteuid())
    notifier = Notifier(settings)
    notifier.send("test", f"a test of {user} on {host}", {"host": host, "user": user})
    notifier.finish(_SECONDS)
    if notifier.has_failed:  # which is logged
        return EXIT_NOT_DONE
    print("delivered")
    return 0
