"""A connection between two launchers, and ``leader.json``, through which they find each other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import multiprocessing.connection
import os
import platform
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf

from robust_train.files import MalformedEvent, from_json
from robust_train.nodes.messages import Message, decode, encode

HOST_VARIABLE = "ROBUST_TRAIN_NODE_HOST"
_FILE = "leader.json"
_MOST_BYTES = 4 << 20
_SILENT_SECONDS = 15  # a node that acknowledges nothing for so long is lost
_KEEPALIVE = {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": 2, "USER_TIMEOUT": _SILENT_SECONDS * 1000}
_PART_SECONDS = 5  # for the rest of a message, or of a greeting


class Connection:
    """Messages over TCP between two that know ``secret``; nobody waits for the other for long.

    What is sent to one that is gone is lost. Raises OSError, EOFError,
    multiprocessing.AuthenticationError: the other one is gone, or does not know the secret.

    Attributes:
        here, there: this host's address as the other one sees it, and the other's.
        lost: how it was seen that the other one is gone, else None.
    """

    def __init__(self, sock: socket.socket, secret: str, *, leads: bool) -> None:
        self.lost: str | None = None
        self.here, self.there = str(sock.getsockname()[0]), str(sock.getpeername()[0])
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _PART_SECONDS, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("NODELAY", 1), *_KEEPALIVE.items()):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        self._pipe = multiprocessing.connection.Connection(sock.detach())
        proofs = (
            multiprocessing.connection.deliver_challenge,
            multiprocessing.connection.answer_challenge,
        )
        try:
            for prove in proofs if leads else reversed(proofs):
                prove(self._pipe, secret.encode())
        except BaseException:
            self._pipe.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when there is something."""
        return self._pipe.fileno()

    def send(self, message: Message) -> None:
        """Send a message."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(encode(message))

    def receive(self, seconds: float = 0.0) -> list[Message]:
        """Return what has arrived, after waiting for it so long."""
        messages: list[Message] = []
        try:
            while self.lost is None and self._pipe.poll(0.0 if messages else seconds):
                messages.append(decode(self._pipe.recv_bytes(_MOST_BYTES)))
        except EOFError:
            self.lost = "its launcher has ended"
        except TimeoutError:
            self.lost = f"silent for {_SILENT_SECONDS} s"
        except (OSError, MalformedEvent) as error:
            self.lost = str(error)
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._pipe.close()


@dataclass(frozen=True)
class Address:
    """The content of ``leader.json``: where the leader listens, and the secret of this launch."""

    hosts: tuple[str, ...]  # to try in this order
    port: int
    secret: str

    def write(self, run_dir: Path) -> None:
        """Write it for this user only; whole, or not at all. Raises OSError."""
        temporary = run_dir / f".{_FILE}.{secrets.token_hex(4)}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump(asdict(self), file)
        temporary.replace(run_dir / _FILE)

    def remove(self, run_dir: Path) -> None:
        """Remove it, unless another launch has written its own."""
        with contextlib.suppress(OSError):
            if read_address(run_dir) == self:
                (run_dir / _FILE).unlink()


def read_address(run_dir: Path) -> Address | None:
    """Return where the leader of a run folder listens, None where there is none."""
    with contextlib.suppress(OSError, ValueError):  # MalformedEvent among them
        os.listdir(run_dir)  # a network disk asks its server anew
        return from_json(Address, json.loads((run_dir / _FILE).read_text()))
    return None


def addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of this host, the likeliest to be reached from others first."""
    if host := environ.get(HOST_VARIABLE):
        return (host,)
    named = ""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    found = [one for one in _interfaces() if "." in one]
    return tuple(sorted(found, key=lambda one: (one.startswith("127."), one != named)))


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address of this host."""
    return _interfaces().get(address, "lo")


def _interfaces() -> dict[str, str]:
    interfaces = psutil.net_if_addrs().items()
    return {one.address: name for name, addresses in interfaces for one in addresses}


def started_with(cfg: DictConfig) -> dict[str, str]:
    """Return what has to be the same on all nodes: versions, and the config by dotted key.

    Interpolations, whose values may differ, as such.
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("robust-train", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)

    def walk(value: object, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, one in value.items():
                walk(one, f"{key}.{name}".lstrip("."))
        else:
            found[key] = str(value)

    walk(OmegaConf.to_container(cfg, resolve=False), "")
    return found
