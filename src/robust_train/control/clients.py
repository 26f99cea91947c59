"""Those who connect to a run's socket: each is held to limits of size and time, all of one user."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from robust_train.control import place
from robust_train.control.protocol import (
    MOST_REQUEST_BYTES,
    Reply,
    encode_reply,
    keep_from_children,
    peer_uid,
)

log = logging.getLogger("robust_train")

_MOST_CLIENTS = 32
_ASKING_SECONDS = 5.0
_TAKING_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 30.0
_PAUSE_SECONDS = 1.0


@dataclass(eq=False)
class Client:
    """One connection: it asks, waits, and takes its reply, and is dropped at ``until``."""

    channel: socket.socket
    until: float
    incoming: bytes = b""
    outgoing: bytes = b""


class Clients:
    """The listening socket and who came in by it. Belongs to one thread, whose selector it uses.

    Args:
        selector: calls the ``data`` of a key that is ready.
        environ: says where the socket belongs.
        name: of the socket.
        serve: is handed each request, a line; it answers with :meth:`reply`, now or later.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        environ: Mapping[str, str],
        name: str,
        serve: Callable[[Client, bytes], None],
    ) -> None:
        self._selector = selector
        self._environ = environ
        self._name = name
        self._serve = serve
        self._all: set[Client] = set()
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._file: tuple[int, int] | None = None
        self._look_at = self._accept_at = math.inf

    def open(self) -> None:
        """Make the socket.

        Raises:
            PlaceProblem: there is no directory for it.
        """
        self._listener, self._path = place.listen(self._environ, self._name)
        keep_from_children(self._listener).setblocking(False)
        told = self._path.lstat()
        self._file = (told.st_dev, told.st_ino)
        self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        self._accept_at = -math.inf

    def close(self) -> None:
        """Drop all and remove the socket."""
        for client in list(self._all):
            self._drop(client)
        if self._is_in_place() and self._path is not None:
            self._path.unlink(missing_ok=True)
        self._stop_listening()

    def next_moment(self) -> float:
        """When :meth:`be_punctual` has something to do, on the monotonic clock."""
        return min(
            self._look_at, self._accept_at, *(client.until for client in self._all), math.inf
        )

    def be_punctual(self, now: float) -> None:
        """Whatever is due by now."""
        if now >= self._accept_at and self._listener is not None:
            self._accept_at = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if now >= self._look_at:
            self._look_after_path()
        for client in [client for client in self._all if now >= client.until]:
            self._drop(client)

    def reply(self, client: Client, reply: Reply) -> None:
        """Send the reply and end the connection; nothing where the client is gone."""
        if client not in self._all:
            return
        client.outgoing = encode_reply(reply)
        client.until = time.monotonic() + _TAKING_SECONDS
        self._forget(client.channel)
        self._send(client)
        if client in self._all:
            self._selector.register(
                client.channel, selectors.EVENT_WRITE, lambda _: self._send(client)
            )

    def _is_in_place(self) -> bool:
        try:
            told = os.lstat(self._path or "")
        except OSError:
            return False
        return (told.st_dev, told.st_ino) == self._file

    def _look_after_path(self) -> None:
        """A login's directory goes with its last session, and cleaners remove old files."""
        self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        if not self._is_in_place():
            self._stop_listening()
            with contextlib.suppress(place.PlaceProblem, OSError):
                self.open()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._forget(listener)
            listener.close()

    def _accept(self, events: int) -> None:
        if self._listener is None:
            return
        try:
            channel, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor left, and that would be reported again at once
            self._forget(self._listener)
            self._accept_at = time.monotonic() + _PAUSE_SECONDS
            return
        keep_from_children(channel).setblocking(False)
        client = Client(channel, time.monotonic() + _ASKING_SECONDS)
        self._all.add(client)
        self._selector.register(channel, selectors.EVENT_READ, lambda _: self._hear(client))
        uid = peer_uid(channel)
        if uid != os.geteuid():
            log.warning("user %d was refused at this run's control socket", uid)
            self.reply(client, {"error": f"this run belongs to user {os.geteuid()}"})
        elif len(self._all) > _MOST_CLIENTS:
            self.reply(client, {"error": f"{_MOST_CLIENTS} others are asking already; try later"})

    def _hear(self, client: Client) -> None:
        try:
            data = client.channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        client.incoming += data
        line, end, _ = client.incoming.partition(b"\n")
        if len(line) > MOST_REQUEST_BYTES:
            self.reply(client, {"error": f"a request has at most {MOST_REQUEST_BYTES} bytes"})
        elif end:
            # nothing more is read of it, so that its going away cannot keep the thread busy
            self._forget(client.channel)
            client.until = math.inf
            self._serve(client, line)
        elif not data:
            self._drop(client)

    def _send(self, client: Client) -> None:
        try:
            sent = client.channel.send(client.outgoing)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        client.outgoing = client.outgoing[sent:]
        if not client.outgoing:
            self._drop(client)

    def _drop(self, client: Client) -> None:
        self._all.discard(client)
        self._forget(client.channel)
        client.channel.close()

    def _forget(self, channel: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
