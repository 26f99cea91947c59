"""How a script ended, as the launcher sees it: from its exit status and the end of its output."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from robust_train.events import ScriptEnded
from robust_train.failures import classify_exit
from robust_train.failures.advice import advice_for
from robust_train.failures.exits import signal_of
from robust_train.values import Evidence, Failure

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_TRACEBACK = "Traceback (most recent call last)"
_MOST_LINES = 40
_LINES = 15


def script_failure(ended: ScriptEnded, tail: str, oom_killed: Callable[[], bool | None]) -> Failure:
    """Return why the script failed, as though its exit were the attempt's; ``tail`` is the end of
    what that printed, ``oom_killed`` whether the kernel's OOM killer took a process."""
    kind, returncode = ended.failure_kind, ended.returncode
    if kind is not None:
        evidence = Evidence(library="script")
        return Failure(kind, ended.message or "", evidence, advice_for(kind, evidence))
    killed = oom_killed() if signal_of(returncode) == signal.SIGKILL else None
    return classify_exit(returncode, without_escapes(tail), oom_killed=killed)


def last_words(tail: str, log_name: str) -> str:
    """Return the end of what a script printed, for people: its last traceback or lines."""
    # of a line that was rewritten, as by a progress bar, what was there in the end
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in without_escapes(tail).split("\n")]
    lines = [line.rstrip() for line in lines if line.strip()]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    shown = lines[starts[-1] :] if starts else lines[-_LINES:]
    text = "\n".join(shown[-_MOST_LINES:]) or "(it printed nothing)"
    return f"the end of the script's output ({log_name}):\n{text}\n"


def without_escapes(text: str) -> str:
    """Remove colours and cursor movements: Python colours tracebacks on a terminal."""
    return _ESCAPES.sub("", text)
