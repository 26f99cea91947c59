"""A connection between two launchers, and ``leader.json``, through which they find each other."""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import json
import os
import platform
import secrets
import select
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf

from robust_train.events import from_json
from robust_train.files import MalformedEvent
from robust_train.nodes.messages import Message, decode, encode

LOST_SECONDS = 15
"""A node from which nothing comes for so long, not even an acknowledgement, is lost."""

HOST_VARIABLE = "ROBUST_TRAIN_NODE_HOST"
_FILE = "leader.json"
_MOST_BYTES = 4 << 20
_SEND_SECONDS = 10.0
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
_VIRTUAL = ("docker", "virbr", "br-", "cni", "flannel")


class Lost(Exception):
    """The other launcher is gone, or its machine is; the message says how that was seen."""


class Connection:
    """Messages over TCP. What is sent to one that is gone is lost; reading tells."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._rest = sock, b""
        sock.settimeout(_SEND_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (*_KEEPALIVE.items(), ("TCP_USER_TIMEOUT", LOST_SECONDS * 1000)):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when there is something."""
        return self._sock.fileno()

    @property
    def here(self) -> str:
        """This host's address, as the other one reaches it."""
        return str(self._sock.getsockname()[0])

    @property
    def there(self) -> str:
        """The other host's address."""
        return str(self._sock.getpeername()[0])

    def send(self, message: Message) -> None:
        """Send a message."""
        with contextlib.suppress(OSError):
            self._sock.sendall(encode(message))

    def receive(self) -> list[Message]:
        """Return what has arrived; never wait. Raises Lost: nothing will any more."""
        messages: list[Message] = []
        try:
            while is_readable(self, 0.0):
                data = self._sock.recv(1 << 16)
                if not data:
                    raise Lost("its launcher has ended")
                *lines, self._rest = (self._rest + data).split(b"\n")
                messages += [decode(line) for line in lines]
                if len(self._rest) > _MOST_BYTES:
                    raise Lost("it sends what is no message")
        except (OSError, MalformedEvent) as error:
            if not messages:
                silent = isinstance(error, TimeoutError)
                why = f"silent for {LOST_SECONDS} s" if silent else str(error)
                raise Lost(why) from None
        except Lost:
            if not messages:
                raise
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def is_readable(source: Connection | socket.socket, seconds: float) -> bool:
    """Return whether something has arrived, after waiting for it."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def proof(secret: str, nonce: str, who: str) -> str:
    """Return what shows that ``who`` (``leader`` or ``follower``) knows the secret."""
    return hmac.new(secret.encode(), f"{who} {nonce}".encode(), "sha256").hexdigest()


def is_proof(given: str, secret: str, nonce: str, who: str) -> bool:
    """Return whether ``given`` is a proof."""
    return hmac.compare_digest(given, proof(secret, nonce, who))


@dataclass(frozen=True)
class Address:
    """The content of ``leader.json``: where the leader listens, and the secret of this launch."""

    hosts: tuple[str, ...]  # addresses to try in this order
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
    found = {
        one.address: name
        for name, all_of in psutil.net_if_addrs().items()
        for one in all_of
        if one.family == socket.AF_INET
    }
    named = ""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())

    def order(address: str) -> tuple[bool, bool, bool]:
        name = found[address]
        return address.startswith("127."), name.startswith(_VIRTUAL), address != named

    return tuple(sorted(found, key=order))


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address of this host."""
    for name, all_of in psutil.net_if_addrs().items():
        if any(one.address == address for one in all_of):
            return name
    return "lo"


def versions() -> dict[str, str]:
    """Return what has to be the same on all nodes."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("robust-train", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def flat(cfg: DictConfig) -> dict[str, str]:
    """Return a config as text by dotted key; interpolations, whose values may differ, as such."""
    found: dict[str, str] = {}

    def walk(value: object, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, one in value.items():
                walk(one, f"{key}.{name}" if key else str(name))
        else:
            found[key] = str(value)

    walk(OmegaConf.to_container(cfg, resolve=False), "")
    return found
