"""Sends requests to a live run and waits for the answers. Commands use it.

A request is a file in the run folder (:mod:`.requests`), which the launcher or the attempt answers
with another file.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from robust_train.files import parse_json, read_small, write_json
from robust_train.folder.lock import is_held
from robust_train.folder.requests import ANSWER, LAUNCHERS_VERB, Reply, new_request
from robust_train.folder.run_list import KnownRun
from robust_train.model.errors import NotDoneError
from robust_train.model.events import Json

USUAL_WAIT_SECONDS = 30.0
_FIGURES_SECONDS = 1.5
# How long a live run may take to see a request. It polls about every half second.
SEEN_SECONDS = 2.0
_POLL_SECONDS = 0.03
_MAX_ANSWER_BYTES = 1 << 20
# A run answers these requests at once. It answers all others after a training step.
_NEED_NO_STEP = frozenset({"stop", "figures", "memory_info"})


class ControlError(NotDoneError):
    """The run did not carry out the request. The message is one line with the reason."""


class StillQueuedError(ControlError):
    """The run has not carried out the request yet, but will."""


def ask(
    run: KnownRun, verb: str, *, wait_seconds: float = USUAL_WAIT_SECONDS, **options: Json
) -> dict[str, Json]:
    """Send a request to a live run, and return its answer.

    Args:
        run: the run.
        verb: the name of the request.
        wait_seconds: how long to wait for a training step to end.
        options: the options of this verb.

    Raises:
        StillQueuedError: no step ended in time. The run carries out the request after its next
            step.
        ControlError: the run refuses, has ended, or does not answer.
    """
    if verb == LAUNCHERS_VERB and run.is_stopped:
        raise _no_answer(run)
    request = new_request(run.run_dir)
    try:
        write_json(request, {"verb": verb, "options": options})
    except OSError as error:
        problem = f"{request.parent} takes no request: {error.strerror}"
        raise ControlError(f"{run.id}: {problem}") from error
    try:
        reply = _wait_for_reply(run, request, wait_seconds)
        if reply is None and (verb in _NEED_NO_STEP or run.is_stopped):
            raise _no_answer(run)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            request.unlink()
        raise
    if reply is None:
        raise StillQueuedError(
            f"{run.id}: no step has ended within {wait_seconds:g} s; the request stays queued and "
            "is carried out after the next step (robust-train status shows the progress)"
        )
    if "error" in reply:
        raise ControlError(f"{run.id}: {reply['error']}")
    return dict(reply["answer"])


def _no_answer(run: KnownRun) -> ControlError:
    why = f"does not answer (pid {run.pid}; is it stopped with Ctrl-Z?)"
    if run.is_stopped:
        why = f"is stopped (Ctrl-Z): continue it with fg or kill -CONT {run.pid}"
    return ControlError(f"{run.id} {why}")


def status(run: KnownRun) -> dict[str, Json]:
    """Return a run's state, with the attempt's current figures if the attempt answers at once."""
    figures: dict[str, Json] = {}
    if run.status == "running":
        with contextlib.suppress(ControlError):
            figures = ask(run, "figures", wait_seconds=_FIGURES_SECONDS)
    return {**run.about(), **figures}


def _wait_for_reply(run: KnownRun, request: Path, wait_seconds: float) -> Reply | None:
    """Return the reply, None if it does not come in time.

    Raises:
        ControlError: the run has ended.
    """
    started = time.monotonic()
    answer = request.with_suffix(ANSWER)
    has_ended = False
    while True:
        names: list[str] = []
        with contextlib.suppress(OSError):  # the folder was removed, or its disk is unreachable
            # The folder is listed, because a network disk may cache whether a single file exists.
            names = os.listdir(answer.parent)
            if answer.name in names:
                content, _ = read_small(answer, _MAX_ANSWER_BYTES)
                answer.unlink(missing_ok=True)
                reply: Reply = parse_json(content)
                return reply
        waited = time.monotonic() - started
        if waited >= wait_seconds and (request.name not in names or waited >= SEEN_SECONDS):
            return None
        if has_ended:
            raise ControlError(f"{run.id} has ended, or ends right now")
        has_ended = is_held(run.run_dir) is False
        time.sleep(_POLL_SECONDS)
