"""Entry of a fork server's process.

Started as ``python -m robust_train.execution.serve CONTROL_FD EVENTS_FD``. It lives in a session
of its own, so that a terminal's Ctrl-C reaches only the launcher, and ends when the launcher does:
the control socket's other end closes however the launcher dies. Signals do not end it: whoever
sends one to all processes of a job means the attempt, which has to save first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Serve one launcher."""
    ignored = [signum for signum in _STOPS if signal.getsignal(signum) == signal.SIG_IGN]
    for signum in _STOPS:
        signal.signal(signum, signal.SIG_IGN)
    # imported once signals can do no harm
    from robust_train.execution.linux import become_subreaper
    from robust_train.execution.server import Server

    control, events = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for channel in (control, events):
        os.set_inheritable(channel.fileno(), False)
    become_subreaper()
    with contextlib.suppress(ConnectionError):
        Server(control, events, ignored).serve()
    os._exit(0)  # taking torch down in good order takes time, and nobody needs it


if __name__ == "__main__":
    main()
