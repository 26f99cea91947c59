"""The attempt's side of ``requests/``: a thread polls, the trainer's own thread carries out.

What changes anything waits for a step boundary: a call of ``run.progress`` and its like, or for
trainers that never use ``run`` the end of an optimizer's step. What only reads is answered at once
by the thread. Without requests a boundary costs the look at an empty list.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from robust_train import compat
from robust_train.events import AttemptProcess, RequestDone
from robust_train.memory import requests as memory_requests
from robust_train.run import Run, memory_in_use
from robust_train.runfolder.requests import (
    LAUNCHERS_VERB,
    Inbox,
    Refused,
    Reply,
    Request,
)

log = logging.getLogger("robust_train")

POLL_SECONDS = 0.5
_JOIN_SECONDS = 1.0
_READ_ONLY = frozenset({"figures", "memory_info"})
_MEMORY_PREFIX = "memory_"
_ROUNDS = 2
"""Boundaries of one kind after which the trainer has gone through its loop once, so that its habits
are known."""


@dataclass
class _Waiting:
    """A request that waits for a boundary.

    Attributes:
        seen: how often each kind of boundary came since.
        begun: it was passed on to the trainer.
    """

    request: Request
    answer: Callable[[Reply], None]
    seen: Counter[str] = field(default_factory=Counter)
    begun: bool = False


class AttemptRequests:
    """Takes and carries out the requests to one attempt; a context manager.

    What is not answered when it is left stays ``.taken``: the launcher knows what comes next.

    Args:
        run: the attempt, as its trainer has it. Only rank 0 takes requests.
        run_dir: the run folder.
        tick: called with every poll, where the launcher's own thread runs the attempt.
    """

    def __init__(
        self,
        run: Run,
        run_dir: Path,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._run_dir = run_dir
        self._tick = tick
        self._inbox = Inbox(run_dir)
        self._waiting: list[_Waiting] = []
        self._is_busy = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop_watching: Callable[[], None] | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for a step boundary."""
        return len(self._waiting)

    def __enter__(self) -> AttemptRequests:
        if self._run.is_main:
            self._run.serve(self._waiting, self._at_boundary)
            self._run.report(AttemptProcess(os.getpid()))
            self._thread = threading.Thread(
                target=self._poll, name="robust-train requests", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)  # a disk may hang
        if self._stop_watching is not None:
            self._stop_watching()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            for request in self._inbox.requests():
                if request.verb != LAUNCHERS_VERB and self._inbox.take(request):
                    self._begin(_Waiting(request, self._answer_to(request)))
            self._tick()

    def _answer_to(self, request: Request) -> Callable[[Reply], None]:
        return lambda reply: self._inbox.answer(request, reply)

    def _begin(self, waiting: _Waiting) -> None:
        if waiting.request.verb in _READ_ONLY:
            self._carry_out(waiting, self._read)
            return
        self._waiting.append(waiting)
        if self._stop_watching is None:
            self._stop_watching = compat.watch_optimizer_steps(self._optimizer_has_stepped)

    def _carry_out(self, waiting: _Waiting, work: Callable[[_Waiting], Reply | None]) -> bool:
        """Return whether the request is done with: carried out, refused, or failed."""
        verb = waiting.request.verb
        try:
            reply = work(waiting)
        except Refused as refusal:
            reply = {"error": str(refusal)}
        except (ValueError, OSError) as error:  # of an option, or of a file
            reply = {"error": f"{verb}: {error}"}
        except Exception as error:  # must not end the training
            lines = str(error).splitlines() or [""]
            reply = {"error": f"{verb}: {type(error).__name__}: {lines[0]}"}
        if reply:
            waiting.answer(reply)
        return reply is not None

    def _read(self, waiting: _Waiting) -> Reply:
        if waiting.request.verb == "figures":
            return {"answer": {"attempt_pid": os.getpid(), "memory": memory_in_use()}}
        return self._about_memory(waiting.request)

    def _optimizer_has_stepped(self) -> None:
        if self._waiting:
            self._at_boundary("optimizer")

    def _at_boundary(self, boundary: str) -> None:
        """Carry out what can be. Called by whoever runs the trainer's loop, between two steps."""
        if not self._is_busy.acquire(blocking=False):
            return  # another thread of the trainer is at it
        try:
            for waiting in list(self._waiting):
                waiting.seen[boundary] += 1
                if self._carry_out(waiting, self._change):
                    self._waiting.remove(waiting)
        finally:
            self._is_busy.release()

    def _change(self, waiting: _Waiting) -> Reply | None:
        """Do what changes the run. None: not at this boundary yet; empty: answered later.

        Raises:
            Refused: this trainer cannot do it.
        """
        verb = waiting.request.verb
        if verb == "checkpoint":
            return self._checkpoint(waiting)
        if verb == "halve_batch":
            return self._halve_batch(waiting)
        if verb.startswith(_MEMORY_PREFIX):
            reply = self._about_memory(waiting.request)
            sentence = reply["answer"].get("sentence")
            log.info("%s on request: %s", verb, sentence)
            self._run.report(RequestDone(verb, self._run.last_step, sentence))
            return reply
        raise Refused(f"{verb}: an attempt knows no such request")

    def _about_memory(self, request: Request) -> Reply:
        options: Mapping[str, Any] = request.options
        return {"answer": memory_requests.perform(request.verb, options, self._run_dir)}

    def _knows_habits(self, waiting: _Waiting) -> bool:
        return max(waiting.seen.values()) >= _ROUNDS

    def _checkpoint(self, waiting: _Waiting) -> Reply | None:
        run = self._run
        if not waiting.begun:
            waiting.begun = True
            log.info("a checkpoint is requested")
            run.request_checkpoint(waiting.answer)
        if run.looks_for_checkpoint_requests:
            return {}
        if not self._knows_habits(waiting):
            return None
        run.withdraw_checkpoint_request(waiting.answer)
        stops = " or 'robust-train run stop', which saves one first" if run.is_cooperative else ""
        raise Refused(
            "this trainer does not read run.checkpoint_requested, so it saves a checkpoint only "
            f"when it would anyway; wait for that{stops}"
        )

    def _halve_batch(self, waiting: _Waiting) -> Reply | None:
        run = self._run
        if run.splits_batches:
            return self._split_finer()
        plan = run.micro_batch_plan
        size, least = plan.batch_size or 1, plan.min_batch_size
        if size <= least:
            raise Refused(_at_minimum(size, least))
        if not self._knows_habits(waiting):
            return None
        if not run.is_cooperative:
            raise Refused(
                "this trainer neither uses run.micro_batches nor reads run.stop_requested, so "
                "its batch cannot be changed while it runs; stop it and start it again with a "
                "smaller training.batch_size"
            )
        if not run.can_restart:
            raise Refused(
                "this trainer does not use run.micro_batches, and nothing starts it again here; "
                "under train_robust.py it would go on from a checkpoint with half the batch"
            )
        log.info("half the micro-batch is requested: stopping at a checkpoint to go on with it")
        run.request_restart()
        return {}  # the launcher answers, at the next attempt

    def _split_finer(self) -> Reply:
        batcher, reason = self._run.micro_batcher, "requested by 'robust-train run halve-batch'"
        changed = batcher.shrink(reason)
        if changed is None:
            size = batcher.size
            if size is None:
                raise Refused("no batch was split so far; try again after the first step")
            raise Refused(_at_minimum(size, self._run.micro_batch_plan.min_batch_size))
        before, after = changed
        return {
            "answer": {
                "before": {"micro_batch": before},
                "after": {"micro_batch": after},
                "how": "from the next step on; the effective batch size stays the same",
            }
        }


def _at_minimum(size: int, least: int) -> str:
    return f"the micro-batch is {size} already, and min_batch_size={least} allows no smaller one"
