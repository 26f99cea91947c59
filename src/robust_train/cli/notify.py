"""``robust-train notify test``: sends a notification as a job with the same keys would."""

from __future__ import annotations

import os
import socket
from argparse import Namespace

from robust_train.cli.command import Answer, UsageError
from robust_train.model.errors import EXIT_FAILED

_NOTIFY_SECONDS = 30.0  # longest wait for the delivery


def send_test(arguments: Namespace) -> Answer:
    """Send a test notification to the program and URLs that the keys name."""
    from robust_train.children.notifier import Notifier, notify_settings
    from robust_train.config.checks import checked, hide_urls
    from robust_train.config.refusals import REFUSALS, composed, explain
    from robust_train.config.values import URLS_VARIABLE
    from robust_train.gpu.processes import user_name

    overrides = arguments.overrides
    try:
        cfg = composed(overrides)
        environ = dict(os.environ)
        hide_urls(cfg, environ)
        settings = notify_settings(checked(cfg).notify, environ)
    except REFUSALS as error:
        problem = explain(error, "robust", overrides)
        raise UsageError(problem) from error
    if not (settings.command or settings.urls):
        problem = f"nothing to send to; give notify.command=…, notify.urls=… or ${URLS_VARIABLE}"
        raise UsageError(problem)
    who = {"host": socket.gethostname(), "user": user_name(os.geteuid())}
    notifier = Notifier(settings)
    notifier.send("test", "a test by {user} on {host}".format(**who), who)
    notifier.finish(_NOTIFY_SECONDS)
    if notifier.has_failed:
        # The notifier has logged the reason.
        return Answer(exit_code=EXIT_FAILED)
    return Answer(shown=["delivered"])
