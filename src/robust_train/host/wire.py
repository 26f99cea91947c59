"""Sends events from an attempt to its launcher: `EventSender` in the attempt, `read_events` in the
launcher.

Each event is a JSON packet on a sequenced-packet socket. Several processes may write to the socket,
a packet arrives whole or not at all, and a killed writer does not leave a truncated packet. Data
that is too large for a packet is written to a file in memory, and the packet carries the file's
descriptor.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from robust_train.model.events import Event, Failed, Finished, parse

log = logging.getLogger("robust_train")

_LARGEST_PACKET = 60_000
_IN_A_FILE = b"\0"  # content of a packet whose data is in a file
MOST_WAITING_BYTES = 64 * 1024**2


class EventSender:
    """Sends an attempt's events. The trainer never waits for its launcher, except in `flush`.

    If the socket is full, progress is dropped, and all other events wait for the next event or
    `flush`. Beyond 64 MiB of waiting events, only the end of the attempt is added. If the launcher
    has died, events are dropped.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Reentrant, because a signal handler may send an event during another send.
        self._lock = threading.RLock()

    def __call__(self, event: Event) -> None:
        """Send an event."""
        with self._lock:
            # Waiting events go first, so that events arrive in order.
            if not self._send_waiting() and event.may_be_dropped:
                return
            data = json.dumps(event.as_json(), default=repr).encode()
            is_end = isinstance(event, (Finished, Failed))
            if is_end or self._waiting_bytes <= MOST_WAITING_BYTES:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
            self._send_waiting()

    def flush(self, timeout_seconds: float = float("inf")) -> None:
        """Send all waiting events, and wait as long as the socket is full. The attempt calls it at
        its end."""
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
        """Send as many waiting events as the socket takes, and return whether no event is left."""
        while self._waiting:
            data = self._waiting[0]
            try:
                self._send(data)
            except BlockingIOError:
                return False
            except OSError:  # The launcher has died.
                self._waiting.clear()
                self._waiting_bytes = 0
                break
            # A signal handler may have removed this event during the send.
            if self._waiting and self._waiting[0] is data:
                self._waiting_bytes -= len(self._waiting.popleft())
        return True

    def _send(self, data: bytes) -> None:
        if len(data) <= _LARGEST_PACKET:
            self._channel.send(data)
        else:
            send_file(self._channel, data)


def send_file(channel: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send data of any size as a file in memory, together with copies of open descriptors."""
    with os.fdopen(os.memfd_create("message"), "wb") as file:
        file.write(data)
        file.flush()
        socket.send_fds(channel, [_IN_A_FILE], [file.fileno()] + list(descriptors))


def read_events(channel: socket.socket, most: int = sys.maxsize) -> Iterator[Event]:
    """Yield the events that arrived on a non-blocking socket, oldest first. Stops after ``most``
    events, because an attempt may send them faster than they are read."""
    for _ in range(most):
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, 2 * _LARGEST_PACKET, 1)
        except ConnectionResetError:
            # The attempt ended with unread data in its socket. Its own events follow this error.
            continue
        except OSError:
            return
        if not data:
            return
        for descriptor in descriptors:
            with os.fdopen(descriptor, "rb") as file:
                file.seek(0)
                data = file.read()
        try:
            event = parse(json.loads(data))
        except ValueError as error:
            log.debug("the attempt sent something that is not an event: %s", error)
            continue
        yield event
