"""The ``robust-train`` command."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

import robust_train
from robust_train.errors import EXIT_FAILED
from robust_train.execution.screen import open_closed_streams
from robust_train.readable import meant

USAGE = """usage: robust-train COMMAND [OPTIONS]

commands:
  train   a job or a sweep (-m), as train_robust.py does   [OVERRIDE …]
  gpus    table of this machine's GPUs and who holds them  [--json]
  queue   jobs that run and wait on this host, and why     [--json] [cancel ID]
  run     a script under the launcher                      [OPTIONS] -- PROGRAM [ARGUMENT …]
  run     your live runs: list, status, checkpoint,        [--json] [--run ID|PATH|PID]
          halve-batch, stop
  runs    your jobs, live and past                         [--json] [--all]
  logs    what a job's attempts print                      [RUN] [-f] [--attempt N]
  notify  send a notification as jobs do                   test [KEY=VALUE …]
  attach  a live job as its terminal would show it         [RUN]
  wait    until jobs have ended; their exit code           [RUN …]
  init    a new project that trains at once                DIR
  plan    memory that a job will take, and where it fits   [OVERRIDE …] [--json]
  doctor  each GPU usable or why not, and the queue        [--json] [--clear GPU]
  report  report.html of a run or sweep, made anew         PATH [--open] [--json]
  memory  of GPUs and of a live run: info, clear, reset,   [--json] [--run ID|PATH|PID]
          fraction, enable, snapshot, kill
  completion  complete commands and keys in bash or zsh
  cleanup show it, and have a run release what it can      [--json] [--stats-only | --force]
"""

_PLAIN = ("completion", "gpus", "queue", "init", "plan", "doctor", "report")
_OF_JOBS = ("runs", "logs", "wait", "attach", "notify")
COMMANDS = {name: f"{name}:main" for name in (*_PLAIN, *_OF_JOBS)} | {
    "train": "door:open_robust",
    "run": "run_script:main",
    "memory": "memory:main",
    "cleanup": "memory:cleanup",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
OF_LIVE_RUNS = ("list", "status", "checkpoint", "halve-batch", "stop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names and paths may hold what the locale has no character for
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, *_FULL):
            raise
        # what is not written yet has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # `… | head` has seen enough
            return 128 + signal.SIGPIPE
        print(f"robust-train: cannot write the output: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return code


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        print(f"robust-train {robust_train.__version__}")
        return 0
    if command not in COMMANDS:
        names = (*COMMANDS, *(f"run {verb}" for verb in OF_LIVE_RUNS))
        problem = f"no such command; {meant(command, names)}"
        print(f"robust-train {command}: {problem}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[command].partition(":")
    # ``run`` starts the program after ``--``; with a verb and no program it talks to live runs
    if command == "run" and rest[:1] and rest[0] in OF_LIVE_RUNS and "--" not in rest:
        module = "live_runs"
    run: Callable[[list[str]], int]
    run = getattr(importlib.import_module(f"robust_train.cli.{module}"), function)
    return run(rest)


if __name__ == "__main__":
    sys.exit(main())
