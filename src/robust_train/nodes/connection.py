"""A connection between two launchers, and ``leader.json``, through which they find each other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import multiprocessing.connection
import os
import platform
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf

from robust_train.errors import ConfigError
from robust_train.execution import TICK_SECONDS
from robust_train.files import MalformedEvent, from_json, replacing
from robust_train.nodes.messages import Hello, Message, decode, encode
from robust_train.queue.queue_dir import boot_name

LEADER_FILE = "leader.json"
HOST_VARIABLE = "ROBUST_TRAIN_NODE_HOST"
_CONNECT_SECONDS = 3.0
_REFUSAL_SECONDS = 10.0
_MOST_BYTES = 4 << 20
_SILENT_SECONDS = 15  # a node that acknowledges nothing for so long is lost
_KEEPALIVE = {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": 2, "USER_TIMEOUT": _SILENT_SECONDS * 1000}
PART_SECONDS = 5  # for the rest of a message, or of a greeting


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
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PART_SECONDS, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("NODELAY", 1), *_KEEPALIVE.items()):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        self._pipe = multiprocessing.connection.Connection(sock.detach())
        # the leader's listener wakes up for those that say something
        os.read(self.fileno(), 1) if leads else os.write(self.fileno(), b"?")
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
        """Return the descriptor, which becomes readable when a message arrives."""
        return self._pipe.fileno()

    def send(self, message: Message) -> None:
        """Send a message."""
        with contextlib.suppress(OSError):  # gone
            try:
                self._pipe.send_bytes(encode(message))
            except BlockingIOError:  # half of it is on its way: nothing can follow
                self.lost = f"it has taken no message for {PART_SECONDS} s"
                with socket.socket(fileno=os.dup(self.fileno())) as sock:
                    sock.shutdown(socket.SHUT_RDWR)

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
        except BlockingIOError:
            self.lost = "silent in the middle of a message"
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

    @contextlib.contextmanager
    def shown_in(self, run_dir: Path) -> Iterator[None]:
        """Keep the address in the run folder for the block, for this user. Raises ConfigError."""
        path = run_dir / LEADER_FILE
        try:
            with replacing(path) as temporary:
                temporary.touch()
                temporary.chmod(0o600)
                temporary.write_text(json.dumps(asdict(self)))
        except OSError as error:
            raise ConfigError(f"num_nodes: {path} cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def connect(run_dir: Path) -> Connection | None:
    """Return a connection to who knows the secret of ``leader.json``; None without one."""
    with contextlib.suppress(OSError, ValueError):  # MalformedEvent among them
        os.listdir(run_dir)  # a network disk asks its server anew
        address = from_json(Address, json.loads((run_dir / LEADER_FILE).read_text()))
        for host in address.hosts:
            with contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
                there = host, address.port
                sock = socket.create_connection(there, _CONNECT_SECONDS)
                return Connection(sock, address.secret, leads=False)
    return None


def send_refusal(run_dir: Path, node: int, problem: str) -> None:
    """Send the leader, if it appears soon, why this node cannot follow."""
    until = time.monotonic() + _REFUSAL_SECONDS
    while (leader := connect(run_dir)) is None and time.monotonic() < until:
        time.sleep(TICK_SECONDS)
    if leader is not None:
        leader.send(hello(node, {}, problem))
        leader.close()


def hello(node: int, started: dict[str, str], refusal: str | None = None) -> Hello:
    """Return how this node presents itself."""
    return Hello(node, socket.gethostname(), started, boot_name(), refusal)


def addresses() -> tuple[str, ...]:
    """Return the addresses of this host, the likeliest to be reached from others first."""
    if host := os.environ.get(HOST_VARIABLE):
        return (host,)
    named = ""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    # without those of a link, which name its interface
    found = [one for one in _interfaces() if "%" not in one and one != "::1"]
    return tuple(sorted(found, key=lambda one: (one[:4] == "127.", ":" in one, one != named)))


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address of this host."""
    return _interfaces().get(address, "lo")


def _interfaces() -> dict[str, str]:
    found = [(name, one) for name, all_ in psutil.net_if_addrs().items() for one in all_]
    return {one.address: name for name, one in found if one.family != socket.AF_PACKET}


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
