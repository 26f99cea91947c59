"""Messages between the launcher and its fork server, and events from an attempt to the launcher.

Control messages are pickled objects with a length in front, on a stream socket between two
processes of one user. Events are JSON, one per packet on a sequenced-packet socket: several
processes may write to it, a packet arrives whole or not at all, and a writer that is killed
half-way leaves no torn message behind. Requests to a zygote are pickled objects on such a socket,
for the same reason.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

ORPHAN_GRACE_SECONDS = 5.0
"""How long an attempt whose launcher is gone may take for a last checkpoint."""

_LENGTH = struct.Struct("!I")
_DESCRIPTOR = struct.Struct("i")
_MOST_DESCRIPTORS = 5
_MAX_EVENT_BYTES = 60_000
_MAX_TEXT = 12_000
_MAX_PACKET_BYTES = 1 << 18


def send_message(channel: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
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
        """Every message that has arrived completely, oldest first."""
        while not self.closed:
            try:
                data, descriptors = _receive(self._channel, 1 << 16, socket.MSG_DONTWAIT)
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


def send_packet(channel: socket.socket, message: Any, descriptors: Sequence[int]) -> None:
    """Send one object and copies of open descriptors as one packet.

    Raises OSError when the other side is gone or the packet is too large.
    """
    socket.send_fds(channel, [pickle.dumps(message)], list(descriptors))


def receive_packet(channel: socket.socket) -> tuple[Any, list[int]] | None:
    """The next packet and the descriptors that came with it, which the caller closes.

    Waits for one; None when nobody can send any more.
    """
    try:
        data, descriptors = _receive(channel, _MAX_PACKET_BYTES, 0)
    except ConnectionError:
        return None
    return (pickle.loads(data), descriptors) if data else None


def _receive(channel: socket.socket, size: int, flags: int) -> tuple[bytes, list[int]]:
    # socket.recv_fds would not close the descriptors on exec
    data, extras, _, _ = channel.recvmsg(
        size,
        socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR.size),
        flags | socket.MSG_CMSG_CLOEXEC,
    )
    descriptors: list[int] = []
    for level, kind, content in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _DESCRIPTOR.size
            descriptors += (number for (number,) in _DESCRIPTOR.iter_unpack(content[:whole]))
    return data, descriptors


def send_event(channel: socket.socket, event: dict[str, Any]) -> None:
    """Send one event; a launcher that is gone is not the trainer's trouble."""
    data = json.dumps(event, default=repr).encode()
    if len(data) > _MAX_EVENT_BYTES:
        data = json.dumps(_shortened(event), default=repr).encode()
    with contextlib.suppress(OSError):
        channel.send(data)


def read_events(channel: socket.socket) -> list[dict[str, Any]]:
    """Every event that has arrived, oldest first, without waiting."""
    events: list[dict[str, Any]] = []
    while True:
        try:
            data = channel.recv(_MAX_EVENT_BYTES * 2, socket.MSG_DONTWAIT)
        except OSError:
            return events
        if not data:
            return events
        events.append(json.loads(data))


def _shortened(value: Any) -> Any:
    """``value`` with long texts cut in the middle and what cannot be cut replaced by a note."""
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return value[: _MAX_TEXT // 4] + "\n[…]\n" + value[-3 * _MAX_TEXT // 4 :]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list) and len(json.dumps(value, default=repr)) > _MAX_TEXT:
        return f"[{len(value)} items, too long to carry over]"
    return value
