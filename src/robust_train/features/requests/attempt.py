"""Carries out requests to a running attempt, in the process that trains.

A command such as ``robust-train checkpoint`` writes a file into the run folder's ``requests/``. A
thread of the attempt polls that folder. It answers requests that only read. A request that changes
something waits for the trainer's thread, which carries it out between two steps: in a call like
``run.progress``, or at the end of an optimizer step if the trainer never uses ``run``.
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
"""After this many step boundaries of a kind, the trainer's loop has run once. So it is known
whether the trainer uses ``run.should_save`` and ``run.backward``."""


@dataclass
class _Pending:
    """A request that waits for a step boundary."""

    request: Request
    # The number of boundaries of each kind since the request.
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def has_seen_loop(self) -> bool:
        """Whether the trainer's loop has run once since the request."""
        return max(self.seen.values(), default=0) >= _ROUNDS


class Requests(InAttempt):
    """Takes and carries out the requests to an attempt, on its first rank.

    If the attempt ends first, a request stays in the folder as ``.taken``, and the launcher answers
    it.
    """

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        self.waiting: list[_Pending] = []  # requests that wait for a step boundary
        self._is_busy = threading.Lock()
        self._stop_watching: Callable[[], None] | None = None

    def tick(self) -> None:
        """Take new requests, and answer the requests that only read."""
        # If another job has the folder by now, the requests are for that job.
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
        """Stop watching the optimizer, because no more requests are taken."""
        if self._stop_watching is not None:
            self._stop_watching()

    def boundary(self, what: str) -> None:
        """Carry out waiting requests, between two steps of the trainer's loop."""
        if not self.waiting or not self._is_busy.acquire(blocking=False):
            return  # Another thread of the trainer is carrying them out.
        try:
            for pending in list(self.waiting):
                pending.seen[what] += 1
                if self._carry_out(pending):
                    self.waiting.remove(pending)
        finally:
            self._is_busy.release()

    def _carry_out(self, pending: _Pending) -> bool:
        """Carry out and answer a request. Return whether it is finished: carried out, refused, or
        failed."""
        verb = pending.request.verb
        try:
            reply = self._reply(pending)
        except RefusedError as refusal:
            problem = Words(self.live.their_keys).text(str(refusal))
            reply = {"error": problem}
        except (ValueError, OSError) as error:  # An option's value or a file is unusable.
            reply = {"error": f"{verb}: {error}"}
        except Exception as error:  # A request must not end the training.
            reply = {"error": f"{verb}: {named_line(error)}"}
        if reply:
            pending.request.answer(reply)
        return reply is not None

    def _reply(self, pending: _Pending) -> Reply | None:
        """Carry out a request.

        Returns:
            The answer. None if this boundary is too early, empty if the answer follows later.

        Raises:
            RefusedError: this trainer cannot do what is requested.
        """
        request = pending.request
        verb = request.verb
        if verb == "figures":
            return {"answer": {"attempt_pid": os.getpid(), "memory": memory_in_use()}}
        if verb == "checkpoint":
            return self._request_checkpoint(pending)
        if verb == "halve_batch":
            return self._halve_batch(pending)
        if not verb.startswith("memory_"):
            raise RefusedError(f"{verb}: attempts do not support this request")
        answer = perform(verb, request.options, self.live.run_dir)
        if verb not in _READ_ONLY:
            sentence = str(answer.get("sentence"))
            # Clearing and limiting log their sentence themselves.
            if verb not in ("memory_clear", "memory_fraction"):
                log.info("%s on request: %s", verb, sentence)
            self.live.reports.send(RequestDone(verb, self.live.reports.last_step, sentence))
        return {"answer": answer}

    def _request_checkpoint(self, pending: _Pending) -> Reply | None:
        """Make the trainer's next ``run.should_save()`` true. Its answer follows the checkpoint."""
        stops = self.live.stops
        answer = pending.request.answer
        if pending.seen.total() == 1:
            log.info("a checkpoint is requested")
            stops.request_checkpoint(answer)
        if stops.saves_on_request:
            return {}
        if not pending.has_seen_loop:
            return None
        stops.withdraw_checkpoint_request(answer)
        other = ""
        if stops.is_cooperative:
            other = ", or use 'robust-train stop', which saves a checkpoint first"
        raise RefusedError(
            "this trainer does not call run.should_save(), so it saves checkpoints only at its own "
            f"times; wait for the next checkpoint{other}"
        )

    def _halve_batch(self, pending: _Pending) -> Reply | None:
        """Use the next smaller micro-batch from the next step on."""
        parts = self.live.parts
        if parts.keeps_batch:
            raise RefusedError(
                f"half the micro-batch would change the training: {parts.keeps_batch}"
            )
        if not parts.splits:
            if not pending.has_seen_loop:
                return None
            raise RefusedError(
                "this trainer does not use run.backward, so its batch cannot be changed while it "
                "runs; stop the job and start it again with a smaller training.batch_size "
                "(--batch-size)"
            )
        changed = parts.shrink("requested by 'robust-train halve-batch'")
        size = parts.batcher().size
        least = parts.plan.min_batch_size
        if changed is None and size is None:
            raise RefusedError("the size of a batch is not known yet; try again after a step")
        if changed is None:
            raise RefusedError(
                f"the micro-batch is already {size}, and min_batch_size={least} allows no smaller "
                "micro-batch"
            )
        before, after = changed
        return {
            "answer": {
                "before": {"micro_batch": before},
                "after": {"micro_batch": after},
                "how": "from the next step on; the effective batch size stays the same",
            }
        }
