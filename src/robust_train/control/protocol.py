"""What is said over a run's socket, and between the launcher and an attempt.

A client sends one request, a line of JSON ``{"verb": …, "options": {…}, "wait": seconds}``, and
gets one line back: ``{"answer": {…}}``, ``{"error": "why not"}``, or ``{"queued": "what now"}``
where the attempt has not come to it in time. The launcher hands requests to the attempt as packets
``{"number": …, "verb": …, "options": {…}}``, and replies come back under the same number.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
import weakref
from typing import Any

MOST_REQUEST_BYTES = 64 * 1024
MOST_REPLY_BYTES = 100_000
USUAL_WAIT_SECONDS = 30.0
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid; see unix(7)

Reply = dict[str, Any]


class Refused(Exception):
    """The request is not carried out: why, and what would help, in one line."""


def encode(message: dict[str, Any]) -> bytes:
    """The message as a line; whatever JSON has no words for as its ``repr``."""
    return json.dumps(message, default=repr, ensure_ascii=False).encode() + b"\n"


def decode(data: bytes) -> dict[str, Any]:
    """The message in a line.

    Raises:
        ValueError: it is none.
    """
    try:
        message = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def encode_reply(reply: Reply) -> bytes:
    """A reply as a line, or that it is too long."""
    data = encode(reply)
    if len(data) <= MOST_REPLY_BYTES:
        return data
    short = {"error": f"the answer is too long ({len(data)} bytes)"}
    return encode({**short, "number": reply["number"]} if "number" in reply else short)


def peer_uid(channel: socket.socket) -> int:
    """The user that the other side had when it connected."""
    _, uid, _ = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def own_user_name() -> str:
    """This process's user, by number where it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_children(channel: socket.socket) -> socket.socket:
    """Have processes that are forked from this one close their copy; returns the socket.

    A data-loader worker that outlives its parent would otherwise keep the socket alive with nobody
    behind it.
    """
    _of_this_process.add(channel)
    return channel


def _close_in_child() -> None:
    for channel in list(_of_this_process):
        channel.close()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_close_in_child)
