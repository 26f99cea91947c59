"""Make a request to a live run and wait for the answer."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from robust_train.files import parse_json, read_small, replacing
from robust_train.runfolder.lock import is_held
from robust_train.runfolder.requests import ANSWER, NEW, REQUESTS
from robust_train.runfolder.runs import Run

USUAL_WAIT_SECONDS = 30.0
_FIGURES_SECONDS = 1.5
_SEEN_SECONDS = 2.0
_POLL_SECONDS = 0.03
_MAX_ANSWER_BYTES = 1 << 20
_NEED_NO_STEP = frozenset({"stop", "figures", "memory_info"})


class ControlError(Exception):
    """The run did not carry out the request: why, in one line."""


class StillQueued(ControlError):
    """The run has not done it so far, but will."""


def ask(
    run: Run, verb: str, *, wait_seconds: float = USUAL_WAIT_SECONDS, **options: Any
) -> dict[str, Any]:
    """Have the run do something, and return its answer.

    Args:
        run: a live one.
        verb: what to do.
        wait_seconds: for a step to end, where that is needed.
        options: of the verb.

    Raises:
        StillQueued: no step has ended in time; the run does it when one does.
        ControlError: the run refuses, is gone, or does not answer.
    """
    request_id = f"{time.time_ns():020}-{os.urandom(4).hex()}"
    folder = run.run_dir / REQUESTS
    request, answer = folder / f"{request_id}{NEW}", folder / f"{request_id}{ANSWER}"
    try:
        with replacing(request) as temporary:
            temporary.write_text(json.dumps({"verb": verb, "options": options}))
    except OSError as error:
        raise ControlError(f"{run.id}: {folder} takes no request: {error.strerror}") from error
    try:
        reply = _wait_for(answer, request, run, wait_seconds)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            request.unlink()
        raise
    if reply is None and verb in _NEED_NO_STEP | ({verb} if run.is_stopped else set()):
        with contextlib.suppress(OSError):
            request.unlink()
        raise ControlError(f"{run.id} does not answer (pid {run.pid}; is it stopped with Ctrl-Z?)")
    if reply is None:
        raise StillQueued(
            f"{run.id}: no step has ended within {wait_seconds:g} s; the request stays queued and "
            "is carried out when one does (robust-train run status tells how far the run is)"
        )
    if "error" in reply:
        raise ControlError(f"{run.id}: {reply['error']}")
    found: dict[str, Any] = reply["answer"]
    return found


def status(run: Run) -> dict[str, Any]:
    """Return a run's state, with the attempt's own figures where it answers at once."""
    if run.status != "running":
        return run.about()
    figures: dict[str, Any] = {}
    with contextlib.suppress(ControlError):
        figures = ask(run, "figures", wait_seconds=_FIGURES_SECONDS)
    return {**run.about(), **figures}


def _wait_for(answer: Path, request: Path, run: Run, wait_seconds: float) -> dict[str, Any] | None:
    """Return the answer, None where it does not come in time.

    Raises:
        ControlError: the run has ended without one.
    """
    started = time.monotonic()
    is_last_look = False
    while True:
        names = os.listdir(answer.parent)  # not a look-up, which a network disk may have cached
        if answer.name in names:
            reply = parse_json(read_small(answer, _MAX_ANSWER_BYTES)[0])
            answer.unlink(missing_ok=True)
            return dict(reply)
        waited = time.monotonic() - started
        if waited >= wait_seconds and (request.name not in names or waited >= _SEEN_SECONDS):
            return None
        if is_last_look:
            raise ControlError(f"{run.id} has ended, or ends right now")
        is_last_look = is_held(run.run_dir) is False
        time.sleep(_POLL_SECONDS)
