"""Messages between the launcher and its fork server, and events from an attempt to the launcher.

Control messages are pickled objects with a length in front, on a stream socket between two
processes of one user. Events are JSON, one per packet on a sequenced-packet socket: several
processes may write to it, a packet arrives whole or not at all, and a writer that is killed
half-way leaves no torn message behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from robust_train.events import Event, MalformedEvent, parse

log = logging.getLogger("robust_train")

ORPHAN_GRACE_SECONDS = 5.0
"""How long an attempt whose launcher is gone may take for a last checkpoint."""

_LENGTH = struct.Struct("!I")
_DESCRIPTOR = struct.Struct("i")
_MOST_DESCRIPTORS = 8
_LARGEST_PACKET = 60_000
_IN_A_FILE = b"\0"
_MOST_WAITING = 100_000


def send_message(channel: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Send one object, and copies of open descriptors with it (for the reader's ``descriptors``).

    Raises OSError when the other side is gone.
    """
    data = pickle.dumps(message)
    data = _LENGTH.pack(len(data)) + data
    if descriptors:
        data = data[socket.send_fds(channel, [data], list(descriptors)) :]
    channel.sendall(data)


class MessageReader:
    """Takes whole messages off a stream socket without ever waiting for one.

    Attributes:
        closed: the other side is gone and nothing is left to read.
        descriptors: that came with messages, oldest first; whoever takes one closes it.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffer = b""
        self.closed = False
        self.descriptors: list[int] = []

    def read(self) -> list[Any]:
        """Return every message that has arrived completely, oldest first."""
        while not self.closed:
            try:
                data, descriptors = _receive(self._channel, 1 << 16)
                self.descriptors += descriptors
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self._buffer += data
            self.closed = not data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(self._buffer[_LENGTH.size : end]))
            self._buffer = self._buffer[end:]
        return messages


def _receive(channel: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Read without waiting; socket.recv_fds would not close the descriptors on exec."""
    data, extras, _, _ = channel.recvmsg(
        size,
        socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR.size),
        socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
    )
    descriptors: list[int] = []
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _DESCRIPTOR.size
            descriptors += (number for (number,) in _DESCRIPTOR.iter_unpack(content[:whole]))
    return data, descriptors


class EventSender:
    """Sends an attempt's events; the trainer never waits for a launcher that does not read.

    Where the socket is full, progress is dropped and everything else is kept until the next event
    or :meth:`flush`. A launcher that is gone is not the trainer's trouble.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._waiting: deque[bytes] = deque()
        self._lock = threading.RLock()  # a signal's handler may interrupt a send

    def __call__(self, event: Event) -> None:
        """Send one event."""
        with self._lock:
            if not self._send_waiting() and event.may_be_dropped:
                return
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(json.dumps(event.as_json(), default=repr).encode())
            self._send_waiting()

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until everything is sent: the attempt ends."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        poll = select.poll()
        poll.register(self._channel, select.POLLOUT)
        while True:
            with self._lock:
                if self._send_waiting():
                    return
            if deadline is not None and time.monotonic() >= deadline:
                return
            poll.poll(500)

    def _send_waiting(self) -> bool:
        """Send what can be sent; return whether nothing is left."""
        while self._waiting:
            try:
                self._send(self._waiting[0])
            except BlockingIOError:
                return False
            except OSError:
                self._waiting.clear()
                break
            self._waiting.popleft()
        return True

    def _send(self, data: bytes) -> None:
        if len(data) <= _LARGEST_PACKET:
            self._channel.send(data, socket.MSG_DONTWAIT)
            return
        file = os.memfd_create("event")
        try:
            with open(file, "wb", closefd=False) as writer:
                writer.write(data)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(file))]
            self._channel.sendmsg([_IN_A_FILE], rights, socket.MSG_DONTWAIT)
        finally:
            os.close(file)


def read_events(channel: socket.socket) -> list[Event]:
    """Return every event that has arrived, oldest first, without waiting."""
    events: list[Event] = []
    while True:
        try:
            data, descriptors = _receive(channel, 2 * _LARGEST_PACKET)
        except OSError:
            return events
        if not data:
            return events
        try:
            events.append(parse(json.loads(_content(data, descriptors))))
        except (ValueError, OSError) as error:  # MalformedEvent is a ValueError
            kind = "malformed event" if isinstance(error, MalformedEvent) else "torn event"
            log.debug("%s from the attempt: %s", kind, error)


def _content(data: bytes, descriptors: Sequence[int]) -> bytes:
    try:
        if not data.startswith(_IN_A_FILE):
            return data
        return os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0) if descriptors else b""
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
