"""Reads the output of a script that has ended.

A script reports no exception to the launcher, so its output has to show why it failed, and whether
it failed although its exit code is 0. :mod:`.ending` and :class:`.job.Job` call these functions in
the launcher's process.
"""

from __future__ import annotations

import re
from dataclasses import replace

from robust_train.failures import classify_exit
from robust_train.failures.printed import drop_before_last_steps, put_final_error_last
from robust_train.failures.stack import TRACEBACK
from robust_train.model.attempt import Attempt
from robust_train.model.events import ScriptEnded
from robust_train.model.exit import Exit
from robust_train.model.failure import Clue, Failure, FailureKind

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# Matches "loss: 0.31", "loss=nan" and "'train_loss': inf".
_LOSS = re.compile(r"loss[\"']?\s{0,3}[=:]?\s{0,3}(\d+\.\d|[-+]?(?:nan|inf)\b)", re.IGNORECASE)
# How many lines people see of a traceback, and of output without a traceback.
_MOST_TRACEBACK_LINES = 40
_LAST_LINES = 15


def classify_script_exit(ended: ScriptEnded, end: Exit) -> Failure:
    """Return why a script failed, by its exit code and its output."""
    output = strip_escapes(end.output)
    failure = classify_exit(ended.returncode, output, oom_killed=end.oom_killed)
    is_unknown = failure.evidence.clue == Clue.UNKNOWN
    if is_unknown and end.shortage and TRACEBACK not in output:
        return classify_exit(ended.returncode, end.shortage)
    return failure


def name_refused_file(failure: Failure, attempt: Attempt) -> Failure:
    """If the script could not load a checkpoint, name its file in the failure and give advice."""
    if failure.evidence.clue != Clue.REFUSED:
        return failure
    file = attempt.checkpoint or attempt.resumed_from or "the file"
    how = (
        f"torch.load takes weights only, and {file} holds more: write torch.load(…, "
        "weights_only=False) for a file of your own, or export "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 if a library loads it"
    )
    problem = failure.message.partition(": ")[0]
    return replace(failure, message=f"{problem}: {how}")


def find_doubt(attempt: Attempt) -> str:
    """Return a warning if a script ended with exit code 0 but its output suggests a failure.

    Returns:
        The warning, empty if nothing suggests a failure.
    """
    if attempt.failure is not None or not isinstance(attempt.script, ScriptEnded):
        return ""
    printed = strip_escapes(attempt.exit.output)
    output = drop_before_last_steps(put_final_error_last(printed)).rstrip()
    failure = classify_exit(1, output)
    lost_workers = failure.kind is FailureKind.WORKER_DEATH
    if not (failure.kind.is_memory or lost_workers or TRACEBACK in output):
        return _find_bad_loss(printed)
    problem = failure.message.removeprefix("ended with exit code 1: ")
    return (
        f"the script ended with exit code 0, but its output shows a failure: {problem} (in a shell "
        "pipe, only the last command, such as tee, sets the exit code: use set -eo pipefail)"
    )


def _find_bad_loss(printed: str) -> str:
    """Return a warning if the last loss in an output is not finite, otherwise an empty string."""
    for line in reversed(re.split(r"[\r\n]", printed)):
        losses = _LOSS.findall(line)
        bad = [loss for loss in losses if not loss[0].isdigit()]
        if bad:
            return f"the script ended with exit code 0, but the last loss it printed is {bad[0]}"
        if losses:
            break
    return ""


def quote_output_end(output: str, log_name: str) -> str:
    """Return the end of a script's output for people: its last traceback or its last lines."""
    printed = put_final_error_last(strip_escapes(output)).split("\n")
    # A progress bar rewrites its line after each carriage return. Only its last state is shown.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in printed]
    lines = [line for line in lines if line]
    starts = [number for number, line in enumerate(lines) if TRACEBACK in line]
    shown = lines[-_LAST_LINES:]
    if starts:
        shown = lines[starts[-1] :][-_MOST_TRACEBACK_LINES:]
    text = "\n".join(shown) or "(it printed nothing)"
    return f"the end of the script's output ({log_name}):\n{text}\n"


def strip_escapes(text: str) -> str:
    """Remove escape codes for colours and cursor movements from a terminal's output."""
    return _ESCAPES.sub("", text)
