"""The attempt's side of ``requests/``: a thread polls, and the trainer's thread carries out.

A request that changes something waits for a step boundary: a call like ``run.progress``, or for
trainers that never use ``run`` the end of an optimizer's step. The thread itself answers requests
that only read. Without requests a boundary costs one look at an empty list.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from robust_train import compat
from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.live import LiveAttempt
from robust_train.config.schema import RobustConfig
from robust_train.config.words import Words
from robust_train.folder.requests import LAUNCHERS_VERB, RefusedError, Reply, Request, find_requests
from robust_train.memory.in_use import memory_in_use
from robust_train.memory.reports import perform
from robust_train.model.events import RequestDone
from robust_train.readable import named_line

log = logging.getLogger("robust_train")

_READ_ONLY = frozenset({"figures", "memory_info"})
_ROUNDS = 2
"""After this many boundaries of a kind, the trainer has gone through its loop once, so its habits
are known."""


@dataclass
class _Pending:
    """A request that waits for a boundary, with the number of boundaries of each kind since."""

    request: Request
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def knows_habits(self) -> bool:
        return max(self.seen.values(), default=0) >= _ROUNDS


class Requests(InAttempt):
    """Takes and carries out the requests to an attempt, on its first rank.

    A request without an answer at its end stays ``.taken``: the launcher knows what follows.
    """

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        self.waiting: list[_Pending] = []  # requests that wait for a step boundary
        self._is_busy = threading.Lock()
        self._stop_watching: Callable[[], None] | None = None

    def tick(self) -> None:
        """Take new requests, and carry out at once those that only read."""
        # those of another job that has the folder by now are not for this one
        if not self.live.saving.owns_folder():
            return
        for request in find_requests(self.live.run_dir):
            if request.verb == LAUNCHERS_VERB or not request.take():
                continue
            if request.verb in _READ_ONLY:
                self._carry_out(_Pending(request))
                continue
            self.waiting.append(_Pending(request))
            if self._stop_watching is None:
                self._stop_watching = compat.watch_optimizer_steps(
                    lambda: self.boundary("optimizer")
                )

    def close(self, error: BaseException | None) -> None:
        """Stop watching the optimizer: from here on no tick takes another request."""
        if self._stop_watching is not None:
            self._stop_watching()

    def boundary(self, what: str) -> None:
        """Carry out the possible requests, between two steps of the trainer's loop."""
        if not self.waiting or not self._is_busy.acquire(blocking=False):
            return  # another thread of the trainer is doing it
        try:
            for waiting in list(self.waiting):
                waiting.seen[what] += 1
                if self._carry_out(waiting):
                    self.waiting.remove(waiting)
        finally:
            self._is_busy.release()

    def _carry_out(self, waiting: _Pending) -> bool:
        """Return whether the request is finished: carried out, refused, or failed."""
        verb = waiting.request.verb
        try:
            reply = self._reply(waiting)
        except RefusedError as refusal:
            problem = Words(self.live.their_keys).text(str(refusal))
            reply = {"error": problem}
        except (ValueError, OSError) as error:  # the value of an option, or the content of a file
            reply = {"error": f"{verb}: {error}"}
        except Exception as error:  # a request must not end the training
            reply = {"error": f"{verb}: {named_line(error)}"}
        if reply:
            waiting.request.answer(reply)
        return reply is not None

    def _reply(self, waiting: _Pending) -> Reply | None:
        """Carry out a request.

        Returns:
            The answer. None if this boundary is too early, empty if the answer follows later.

        Raises:
            RefusedError: this trainer cannot do it.
        """
        request = waiting.request
        verb = waiting.request.verb
        if verb == "figures":
            return {"answer": {"attempt_pid": os.getpid(), "memory": memory_in_use()}}
        if verb == "checkpoint":
            return self._checkpoint(waiting)
        if verb == "halve_batch":
            return self._split_finer(waiting)
        if not verb.startswith("memory_"):
            raise RefusedError(f"{verb}: an attempt knows no such request")
        answer = perform(verb, request.options, self.live.run_dir)
        if verb not in _READ_ONLY:
            sentence = str(answer.get("sentence"))
            # Clearing and limiting log their sentence themselves.
            if verb not in ("memory_clear", "memory_fraction"):
                log.info("%s on request: %s", verb, sentence)
            self.live.reports.send(RequestDone(verb, self.live.reports.last_step, sentence))
        return {"answer": answer}

    def _checkpoint(self, waiting: _Pending) -> Reply | None:
        stops = self.live.stops
        answer = waiting.request.answer
        if waiting.seen.total() == 1:
            log.info("a checkpoint is requested")
            stops.request_checkpoint(answer)
        if stops.saves_on_request:
            return {}
        if not waiting.knows_habits:
            return None
        stops.withdraw_checkpoint_request(answer)
        other = ""
        if stops.is_cooperative:
            other = " or 'robust-train stop', which saves one first"
        raise RefusedError(
            "this trainer does not call run.should_save(), so it saves a checkpoint only "
            f"when it would anyway; wait for that{other}"
        )

    def _split_finer(self, waiting: _Pending) -> Reply | None:
        parts = self.live.parts
        if parts.keeps_batch:
            raise RefusedError(
                f"half the micro-batch would change the training: {parts.keeps_batch}"
            )
        if not parts.splits:
            if not waiting.knows_habits:
                return None
            raise RefusedError(
                "this trainer does not use run.backward, so its batch cannot be changed while it "
                "runs; stop it and start it again with a smaller training.batch_size (--batch-size)"
            )
        changed = parts.shrink("requested by 'robust-train halve-batch'")
        size = parts.batcher().size
        least = parts.plan.min_batch_size
        if changed is None and size is None:
            raise RefusedError("no batch was split so far; try again after the first step")
        if changed is None:
            raise RefusedError(
                f"the micro-batch is {size} already, and min_batch_size={least} allows no smaller "
                "one"
            )
        before, after = changed
        return {
            "answer": {
                "before": {"micro_batch": before},
                "after": {"micro_batch": after},
                "how": "from the next step on; the effective batch size stays the same",
            }
        }
