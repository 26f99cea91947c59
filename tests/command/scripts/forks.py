"""Saves when it is asked to; a fork of it has the same handler, and would save as well."""

import os
import signal
import sys
import time
from pathlib import Path

ready, saved = map(Path, sys.argv[1:])


def save(*_):
    with saved.open("a") as file:
        file.write(f"{os.getpid()}\n")
    os._exit(0)


for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, save)
pid = os.getpid()
fork = os.fork()
if fork:
    ready.with_suffix(".fork").write_text(str(fork))
    ready.with_suffix(".new").write_text(str(pid))
    ready.with_suffix(".new").rename(ready)
while True:
    time.sleep(1000)
