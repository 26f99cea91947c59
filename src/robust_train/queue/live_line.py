"""How waiting shows: one line that counts down on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from types import TracebackType
from typing import TextIO

from robust_train.queue.wait import WaitStatus

log = logging.getLogger("robust_train")

_CLEAR_LINE = "\r\x1b[K"


class LiveLine:
    """Shows a :class:`WaitStatus` again and again; a context manager that leaves no trace.

    On a terminal one line is rewritten in place. Elsewhere, or with ``TERM=dumb``, each look at the
    GPUs gives one log line, and the seconds between them none.

    Args:
        stream: where the terminal may be; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._rewrites = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._logged_checks = 0
        self._on_screen = False

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._on_screen:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._on_screen = False

    def show(self, status: WaitStatus) -> None:
        """Show ``status`` now."""
        if self._rewrites:
            # a line that wraps could not be rewritten
            room = shutil.get_terminal_size().columns - 1
            text = status.sentence()
            shown = text if len(text) <= room else text[: max(room - 1, 0)] + "…"
            self._stream.write(_CLEAR_LINE + shown)
            self._stream.flush()
            self._on_screen = True
        elif status.checks > self._logged_checks:
            self._logged_checks = status.checks
            log.info("%s", status.sentence())
