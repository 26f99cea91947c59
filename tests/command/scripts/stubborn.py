"""Starts children, some in sessions of their own, and does not end at SIGTERM, nor do they.

Writes all process ids to the file in its argument; then makes one in .ready beside it, and
one in .asked when SIGTERM came.
"""

import os
import signal
import sys
import time
from pathlib import Path

pids = Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: pids.with_suffix(".asked").touch())


def note():
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n")


note()
for number in range(3):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if number:
            os.setsid()
        if number == 2 and os.fork():
            note()
            time.sleep(1000)
        note()
        time.sleep(1000)
while len(pids.read_text().split()) < 5:
    time.sleep(0.01)
pids.with_suffix(".ready").touch()
time.sleep(1000)
