"""An attempt's side: a thread takes requests in, the trainer's own thread carries them out.

What changes anything waits for a step boundary: a call of ``run.progress`` and its like, or for
trainers that never use ``run`` the end of an optimizer's step. What only reads is answered at once
by the thread. As long as nobody asks, the thread sleeps and a boundary costs the look at an empty
list.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from robust_train.control.protocol import (
    MOST_REQUEST_BYTES,
    Refused,
    Reply,
    decode,
    encode_reply,
    keep_from_children,
)
from robust_train.events import RequestDone
from robust_train.memory import requests
from robust_train.run import Run, memory_in_use

log = logging.getLogger("robust_train")

_READ_ONLY = frozenset({"figures", "memory_info"})
_MEMORY_PREFIX = "memory_"
_ROUNDS = 2
"""Boundaries of one kind after which the trainer has gone through its loop once, so that its habits
are known."""


@dataclass
class _Request:
    """One request that waits for a boundary.

    Attributes:
        answer: sends the reply.
        seen: how often each kind of boundary came since.
        begun: it was passed on to the trainer.
    """

    verb: str
    options: Mapping[str, Any]
    answer: Callable[[Reply], None]
    seen: Counter[str] = field(default_factory=Counter)
    begun: bool = False


class AttemptRequests:
    """Takes in and carries out what is asked of one attempt; a context manager.

    Args:
        run: the attempt, as its trainer has it.
        channel: the launcher's requests; it belongs to this object from now on. None: there are
            none, and nothing is set up.
        run_dir: where what is written goes.
    """

    def __init__(self, run: Run, channel: socket.socket | None, run_dir: Path) -> None:
        self._run = run
        self._run_dir = run_dir
        self._channel = channel
        self._waiting: list[_Request] = []
        self._is_busy = threading.Lock()
        self._hook: Any = None

    def __enter__(self) -> AttemptRequests:
        if self._channel is not None:
            keep_from_children(self._channel)
            self._run.serve(self._waiting, self._at_boundary)
            self._send({"pid": os.getpid()})
            threading.Thread(target=self._listen, name="robust-train requests", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)  # wakes the thread, closing would not
            self._channel.close()

    def _listen(self) -> None:
        assert self._channel is not None
        while True:
            try:
                data = self._channel.recv(2 * MOST_REQUEST_BYTES)
            except OSError:
                return
            if not data:
                return
            message = decode(data)
            number, verb = message["number"], str(message["verb"])
            request = _Request(verb, message["options"], self._answer_to(number))
            if verb in _READ_ONLY:
                self._carry_out(request, lambda r: self._read(r.verb, r.options))
            else:
                self._waiting.append(request)
                self._watch_optimizers()

    def _answer_to(self, number: int) -> Callable[[Reply], None]:
        return lambda reply: self._send({**reply, "number": number})

    def _send(self, message: Reply) -> None:
        """Send, unless the launcher has stopped reading: the trainer must never wait for it."""
        assert self._channel is not None
        with contextlib.suppress(OSError):
            self._channel.send(encode_reply(message), socket.MSG_DONTWAIT)

    def _carry_out(self, request: _Request, work: Callable[[_Request], Reply | None]) -> bool:
        """Whether the request is done with: carried out, refused, or failed."""
        try:
            answer = work(request)
        except Refused as refusal:
            request.answer({"error": str(refusal)})
        except (ValueError, OSError) as error:  # of an option, or of a file
            request.answer({"error": f"{request.verb}: {error}"})
        except Exception as error:  # what goes wrong here must not end the training
            lines = str(error).splitlines() or [""]
            request.answer({"error": f"{request.verb}: {type(error).__name__}: {lines[0]}"})
        else:
            if answer is None:
                return False
            if answer:
                request.answer(answer)
        return True

    def _read(self, verb: str, options: Mapping[str, Any]) -> Reply:
        if verb == "figures":
            return {"answer": {"attempt_pid": os.getpid(), "memory": memory_in_use()}}
        return self._about_memory(verb, options)

    def _at_boundary(self, boundary: str) -> None:
        """Carry out what can be. Called by whoever runs the trainer's loop, between two steps."""
        if not self._is_busy.acquire(blocking=False):
            return  # another thread of the trainer is at it
        try:
            for request in list(self._waiting):
                request.seen[boundary] += 1
                if self._carry_out(request, self._change):
                    self._waiting.remove(request)
        finally:
            self._is_busy.release()

    def _change(self, request: _Request) -> Reply | None:
        """Do what changes the run. None: not at this boundary yet; empty: answered later.

        Raises:
            Refused: this trainer cannot do it.
        """
        if request.verb == "checkpoint":
            return self._checkpoint(request)
        if request.verb == "halve_batch":
            return self._halve_batch(request)
        if request.verb.startswith(_MEMORY_PREFIX):
            reply = self._about_memory(request.verb, request.options)
            sentence = reply["answer"].get("sentence")
            log.info("%s on request: %s", request.verb, sentence)
            self._run.report(RequestDone(request.verb, self._run.last_step, sentence))
            return reply
        raise Refused(f"{request.verb}: an attempt knows no such request")

    def _about_memory(self, verb: str, options: Mapping[str, Any]) -> Reply:
        return {"answer": requests.perform(verb, dict(options), self._run_dir)}

    def _knows_habits(self, request: _Request) -> bool:
        return max(request.seen.values()) >= _ROUNDS

    def _checkpoint(self, request: _Request) -> Reply | None:
        run = self._run
        if not request.begun:
            request.begun = True
            log.info("a checkpoint is asked for")
            run.request_checkpoint(request.answer)
        if run.looks_for_checkpoint_requests:
            return {}
        if not self._knows_habits(request):
            return None
        run.withdraw_checkpoint_request(request.answer)
        stops = " or 'robust-train run stop', which saves one first" if run.is_cooperative else ""
        raise Refused(
            "this trainer does not look at run.checkpoint_requested, so it saves a checkpoint only "
            f"when it would anyway; wait for that{stops}"
        )

    def _halve_batch(self, request: _Request) -> Reply | None:
        run = self._run
        if run.splits_batches:
            return self._split_finer()
        plan = run.micro_batch_plan
        size, least = plan.batch_size or 1, plan.min_batch_size
        if size <= least:
            raise Refused(_at_minimum(size, least))
        if not self._knows_habits(request):
            return None
        if not run.is_cooperative:
            raise Refused(
                "this trainer neither uses run.micro_batches nor looks at run.stop_requested, so "
                "its batch cannot be changed while it runs; stop it and start it again with a "
                "smaller training.batch_size"
            )
        if not run.can_restart:
            raise Refused(
                "this trainer does not use run.micro_batches, and nothing starts it again here; "
                "under train_robust.py it would go on from a checkpoint with half the batch"
            )
        log.info("half the micro-batch is asked for: stopping at a checkpoint to go on with it")
        run.request_restart()
        return {"restart": True}

    def _split_finer(self) -> Reply:
        batcher, reason = self._run.micro_batcher, "asked for by 'robust-train run halve-batch'"
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

    def _watch_optimizers(self) -> None:
        """Let the end of an optimizer's step count as a boundary, for trainers without ``run``."""
        optimizer = sys.modules.get("torch.optim.optimizer")
        if optimizer is None or self._hook is not None:
            return
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        # adding to the hooks while another thread goes through them would raise over there; an
        # empty table is gone through in no time
        if register is None or getattr(optimizer, "_global_optimizer_post_hooks", True):
            return

        def step_is_done(optimizer: object, args: object, kwargs: object) -> None:
            if self._waiting:
                self._at_boundary("optimizer")

        self._hook = register(step_is_done)


def _at_minimum(size: int, least: int) -> str:
    return f"the micro-batch is {size} already, and min_batch_size={least} allows no smaller one"
