"""Events on their way from an attempt to its launcher.

Each is one JSON packet on a sequenced-packet socket: several processes may write to it, a packet
arrives whole or not at all, and a writer that is killed leaves no torn one behind. A packet too
large for the socket is a file in memory, whose descriptor is sent.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque

from robust_train.events import Event, parse

log = logging.getLogger("robust_train")

_LARGEST_PACKET = 60_000
_IN_A_FILE = b"\0"
_MOST_WAITING = 100_000


class EventSender:
    """Sends an attempt's events; the trainer never waits for a launcher that does not read.

    Where the socket is full, progress is dropped and everything else is kept until the next event
    or :meth:`flush`. A launcher that is gone is ignored.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
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

    def flush(self, timeout_seconds: float = float("inf")) -> None:
        """Wait until everything is sent: the attempt ends."""
        deadline = time.monotonic() + timeout_seconds
        poll = select.poll()
        poll.register(self._channel, select.POLLOUT)
        while True:
            with self._lock:
                if self._send_waiting():
                    return
            if time.monotonic() >= deadline:
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
            self._channel.send(data)
            return
        with os.fdopen(os.memfd_create("event"), "wb") as file:
            file.write(data)
            file.flush()
            socket.send_fds(self._channel, [_IN_A_FILE], [file.fileno()])


def read_events(channel: socket.socket) -> list[Event]:
    """Return every event that has arrived on a non-blocking socket, oldest first."""
    events: list[Event] = []
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, 2 * _LARGEST_PACKET, 1)
        except OSError:
            return events
        if not data:
            return events
        for descriptor in descriptors:
            with os.fdopen(descriptor, "rb") as file:
                data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
        try:
            events.append(parse(json.loads(data)))
        except ValueError as error:
            log.debug("the attempt sent what is no event: %s", error)
