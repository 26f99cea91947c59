"""Set things up: ``init`` writes a project, ``notify test`` tries the notifications."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.cli.command import Answer, CommandFailed
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_TEMPLATE = "project_template"
_NOTIFY_SECONDS = 30.0


def init(arguments: Namespace) -> Answer:
    """Write a new project; overwrite nothing."""
    folder = Path(arguments.dir)
    contents = dict(_files(files("robust_train") / _TEMPLATE))
    existing = sorted(
        str(folder / name) for name in contents if os.path.lexists(folder / name)
    )
    if existing:
        raise CommandFailed(
            f"{existing[0]} exists already; name another folder", EXIT_BAD_CONFIG
        )
    try:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(
                "xb"
            ) as file:  # never over a file that was created meanwhile
                file.write(content)
    except OSError as error:
        raise CommandFailed(
            f"{error.filename}: {error.strerror}", EXIT_BAD_CONFIG
        ) from error
    return Answer(
        shown=[
            f"wrote {', '.join(sorted(contents))}; now: cd {folder} && python main.py"
        ],
    )


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.name == "__pycache__":
            continue
        if item.is_dir():
            yield from _files(item, f"{prefix}{item.name}/")
        else:
            yield f"{prefix}{item.name}", item.read_bytes()


def notify(arguments: Namespace) -> Answer:
    """Send a notification as a job with these keys would."""
    from robust_train.config.checks import checked, hide_urls
    from robust_train.config.refusals import REFUSALS, composed, explain
    from robust_train.config.values import URLS_VARIABLE
    from robust_train.gpu.processes import user_name
    from robust_train.launcher.notifier import Notifier, notifications

    overrides = arguments.overrides
    try:
        cfg, environ = composed(overrides), dict(os.environ)
        hide_urls(cfg, environ)
        settings = notifications(checked(cfg).notify, environ)
    except REFUSALS as error:
        raise CommandFailed(
            explain(error, "robust", overrides), EXIT_BAD_CONFIG
        ) from error
    if not (settings.command or settings.urls):
        problem = f"nothing to send to; give notify.command=…, notify.urls=… or ${URLS_VARIABLE}"
        raise CommandFailed(problem, EXIT_BAD_CONFIG)
    host, user = socket.gethostname(), user_name(os.geteuid())
    notifier = Notifier(settings)
    notifier.send("test", f"a test of {user} on {host}", {"host": host, "user": user})
    notifier.finish(_NOTIFY_SECONDS)
    if notifier.has_failed:  # which is logged
        return Answer(exit_code=EXIT_FAILED)
    return Answer(shown=["delivered"])
