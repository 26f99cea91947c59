"""The launcher's side of the socket: one daemon thread, asleep until somebody asks.

It answers for the launcher while that waits in line, decides, or sits behind an attempt that hangs,
and hands to the attempt what only that can do.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from robust_train.control.clients import Client, Clients
from robust_train.control.place import PlaceProblem
from robust_train.control.protocol import (
    MOST_REPLY_BYTES,
    USUAL_WAIT_SECONDS,
    Refused,
    Reply,
    decode,
    encode,
    keep_from_children,
)

log = logging.getLogger("robust_train")

_LONGEST_WAIT_SECONDS = 3600.0
_FIGURES_SECONDS = 1.0
_TOO_EARLY = "ended before it came to that"


class Desk(Protocol):
    """Who the requests are for. Called from the server's thread."""

    def about(self) -> dict[str, Any]:
        """Who this run is and how it stands."""

    def carry_out(self, verb: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to what the launcher does itself, None for what an attempt has to do.

        Raises:
            Refused: it is not done.
        """

    def hear(self, message: Mapping[str, Any]) -> None:
        """What the attempt says of itself."""


@dataclass
class _Pending:
    """A request that the attempt has.

    Attributes:
        client: who asked.
        until: when the client is told that it takes longer.
        finish: makes the client's reply of the attempt's, None where that has not come in time.
    """

    client: Client
    until: float
    finish: Callable[[Reply | None], Reply]


@dataclass
class _Attempt:
    """The way to the attempt that runs, and what it was asked, by number."""

    channel: socket.socket
    pending: dict[int, _Pending] = field(default_factory=dict)


class ControlServer:
    """Serves one run's socket.

    Args:
        desk: answers.
        token: six hexadecimal digits that tell this run's socket from others of this process.
        environ: says where the socket belongs.

    Raises:
        PlaceProblem: there is no directory for it.
    """

    def __init__(self, desk: Desk, token: str, environ: Mapping[str, str]) -> None:
        self._desk = desk
        self._selector = selectors.DefaultSelector()
        name = f"{os.getpid()}-{token}.sock"
        self._clients = Clients(self._selector, environ, name, self._serve)
        try:
            self._clients.open()
        except PlaceProblem:
            self._selector.close()
            raise
        self._attempt: _Attempt | None = None
        self._restarts: list[_Pending] = []
        self._number = 0
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._take_posted)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="robust-train control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell who still waits that the run is over, and remove the socket; safe to call again."""
        if self._wake_write < 0:
            return

        def end() -> None:
            self._let_go(f"the run {_TOO_EARLY}")
            self._settle_restarts({"error": f"the run {_TOO_EARLY}"})
            self._is_closing = True

        self._post(end)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1  # who posts later must not write into another file

    def attach(self, channel: socket.socket) -> None:
        """An attempt runs: requests go over ``channel``, which is the server's now."""
        keep_from_children(channel).setblocking(False)

        def begin() -> None:
            self._attempt = _Attempt(channel)
            self._selector.register(channel, selectors.EVENT_READ, self._hear_attempt)

        self._post(begin)

    def detach(self) -> None:
        """The attempt is over."""
        self._post(lambda: self._let_go(f"the attempt {_TOO_EARLY}"))

    def restarted(self, reply: Reply) -> None:
        """The next attempt begins: the reply to those whose request that was."""
        self._post(lambda: self._settle_restarts(reply))

    def _post(self, action: Callable[[], None]) -> None:
        """Have the thread do something."""
        self._posted.append(action)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def _take_posted(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._posted:
            self._posted.popleft()()

    def _run(self) -> None:
        # signals are the main thread's: it is the one that has to wake up for them
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while not self._is_closing:
                self._be_punctual(time.monotonic())
                left = self._next_moment() - time.monotonic()
                for key, events in self._selector.select(max(left, 0.0)):
                    key.data(events)
        except Exception as error:
            log.warning("this run cannot be talked to any more (%r); it goes on", error)
        finally:
            self._clients.close()

    def _waiting(self) -> list[_Pending]:
        asked = [] if self._attempt is None else list(self._attempt.pending.values())
        return asked + self._restarts

    def _next_moment(self) -> float:
        moments = (pending.until for pending in self._waiting())
        return min(self._clients.next_moment(), *moments, math.inf)

    def _be_punctual(self, now: float) -> None:
        self._clients.be_punctual(now)
        for pending in self._waiting():
            if now >= pending.until and pending.until < math.inf:
                pending.until = math.inf  # the attempt has it still
                self._clients.reply(pending.client, pending.finish(None))

    def _serve(self, client: Client, line: bytes) -> None:
        try:
            request = decode(line)
            verb, options = request["verb"], request.get("options", {})
            wait = float(request.get("wait", USUAL_WAIT_SECONDS))
            if not isinstance(verb, str) or not isinstance(options, dict) or math.isnan(wait):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            self._clients.reply(client, {"error": "that is no request"})
            return
        try:
            self._carry_out(client, verb, options, min(max(wait, 0.0), _LONGEST_WAIT_SECONDS))
        except Refused as refusal:
            self._clients.reply(client, {"error": str(refusal)})

    def _carry_out(self, client: Client, verb: str, options: dict[str, Any], wait: float) -> None:
        if verb == "status":
            self._status(client)
            return
        answer = self._desk.carry_out(verb, options)
        if answer is not None:
            self._clients.reply(client, {"answer": answer})
            return
        if self._attempt is None:
            state = self._desk.about()["state"]
            raise Refused(f"no attempt runs that could do that: the run is {state}; try later")

        def finish(reply: Reply | None) -> Reply:
            if reply is not None:
                return reply
            return {
                "queued": f"no step has ended within {wait:g} s; the request stays queued and is "
                "carried out when one does (robust-train run status tells how far the run is)"
            }

        self._ask_attempt(client, verb, options, wait, finish)

    def _status(self, client: Client) -> None:
        """The launcher's account, with the attempt's own figures if it has a thread to spare."""

        def finish(reply: Reply | None) -> Reply:
            own = {} if reply is None else reply.get("answer", {})
            return {"answer": {**self._desk.about(), **own}}

        if self._attempt is None:
            self._clients.reply(client, finish(None))
        else:
            self._ask_attempt(client, "figures", {}, _FIGURES_SECONDS, finish)

    def _ask_attempt(
        self,
        client: Client,
        verb: str,
        options: dict[str, Any],
        wait: float,
        finish: Callable[[Reply | None], Reply],
    ) -> None:
        attempt = self._attempt
        assert attempt is not None
        self._number += 1
        message = {"number": self._number, "verb": verb, "options": options}
        try:
            attempt.channel.send(encode(message))
        except OSError:  # it reads no more, or is on its way out
            reply = finish({"error": "the attempt takes no requests now; try again"})
            self._clients.reply(client, reply)
            return
        attempt.pending[self._number] = _Pending(client, time.monotonic() + wait, finish)

    def _hear_attempt(self, events: int) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        try:
            data = attempt.channel.recv(2 * MOST_REPLY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._let_go(f"the attempt {_TOO_EARLY}")
            return
        reply = decode(data)
        number = reply.pop("number", None)
        if number is None:
            self._desk.hear(reply)
            return
        pending = attempt.pending.pop(number)
        if "restart" in reply:
            self._restarts.append(pending)
        else:
            self._clients.reply(pending.client, pending.finish(reply))

    def _let_go(self, why: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        self._selector.unregister(attempt.channel)
        attempt.channel.close()
        for pending in attempt.pending.values():
            self._clients.reply(pending.client, pending.finish({"error": why}))

    def _settle_restarts(self, reply: Reply) -> None:
        restarts, self._restarts = self._restarts, []
        for pending in restarts:
            self._clients.reply(pending.client, reply)
