"""Entry of a fork server's process.

Started as ``python -m robust_train.execution.serve CONTROL_FD EVENTS_FD``. It lives in a session
of its own, so that a terminal's Ctrl-C reaches only the launcher, and it ends when the launcher
does: the control socket's other end closes however the launcher dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from robust_train.execution import zygote
from robust_train.execution.prctl import become_subreaper
from robust_train.execution.server import Server


def main() -> None:
    """Serve one launcher, or become the zygote of a sweep."""
    control = socket.socket(fileno=int(sys.argv[1]))
    events = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    with contextlib.suppress(ConnectionError):
        server = Server(control, events)
        server.serve()
        if server.requests is not None:
            server.close()
            zygote.serve(server.requests)
            os._exit(0)  # to take torch down in good order takes time, and the sweep waits


if __name__ == "__main__":
    main()
