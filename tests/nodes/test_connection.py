"""The line between two launchers, on this machine's loopback, and how a follower obeys."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from robust_train.config.schema import complete
from robust_train.errors import ConfigError
from robust_train.execution.signals import SignalWatch
from robust_train.nodes import connection as module
from robust_train.nodes import follow
from robust_train.nodes.connection import (
    HOST_VARIABLE,
    LEADER_FILE,
    Address,
    Connection,
    connect,
    started_with,
)
from robust_train.nodes.follower import Follower
from robust_train.nodes.leader import Leader, _Follower
from robust_train.nodes.messages import (
    Begin,
    Done,
    End,
    Ended,
    Hello,
    Message,
    Reserved,
    Stop,
)
from robust_train.nodes.place import Place
from robust_train.values import AttemptSpec, Failure, FailureKind
from world import wait_until


def meet(secret: str, other: str) -> tuple[Connection | BaseException, Connection | BaseException]:
    """What becomes of both ends of a connection whose sides know these secrets."""
    found: dict[bool, Connection | BaseException] = {}

    def be(sock: socket.socket, known: str, leads: bool) -> None:
        try:
            found[leads] = Connection(sock, known, leads=leads)
        except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
            found[leads] = error

    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        there = threading.Thread(target=be, args=(far, other, False))
        there.start()
        be(listener.accept()[0], secret, True)
        there.join()
    return found[True], found[False]


def test_messages_go_both_ways_until_one_end_is_closed():
    leader, follower = meet("a secret", "a secret")
    assert isinstance(leader, Connection)
    assert isinstance(follower, Connection)
    follower.send(Stop(15))
    follower.send(Stop(2))
    heard: list[Message] = []
    while len(heard) < 2:
        heard += leader.receive(10)
    assert heard == [Stop(15), Stop(2)]
    assert leader.lost is None
    follower.close()
    assert leader.receive(10) == []
    assert leader.lost == "its launcher has ended"
    leader.send(Stop(15))  # to nobody
    leader.close()


def test_half_a_message_is_the_last_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PART_SECONDS", 1)
    leader, follower = meet("a secret", "a secret")
    assert isinstance(leader, Connection)
    assert isinstance(follower, Connection)
    sent = Done("failed", 1, "x" * (1 << 20))
    for _ in range(100):  # until the other one, which is stopped, takes no more
        follower.send(sent)
        if follower.lost is not None:
            break
    assert follower.lost == "it has taken no message for 1 s"
    follower.send(Stop(15))
    heard: list[Message] = []
    while leader.lost is None:
        heard += leader.receive(10)
    assert heard == [sent] * len(heard)
    assert "end of file" in leader.lost


def test_who_does_not_know_the_secret_is_not_taken_in():
    ends = meet("a secret", "another")
    assert not any(isinstance(end, Connection) for end in ends)


def test_the_leader_is_found_by_a_file_for_its_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(HOST_VARIABLE, "192.0.2.1")  # node 0's, set on all nodes alike
    assert connect(tmp_path) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        leader: list[Connection] = []
        serve = threading.Thread(
            target=lambda: leader.append(Connection(listener.accept()[0], "a secret", leads=True)),
            daemon=True,
        )
        with Address(("127.0.0.1",), port, "a secret").shown_in(tmp_path):
            assert (tmp_path / LEADER_FILE).stat().st_mode & 0o777 == 0o600
            assert json.loads((tmp_path / LEADER_FILE).read_text())["port"] == port
            serve.start()
            follower = connect(tmp_path)
        assert not (tmp_path / LEADER_FILE).exists()
        serve.join(10)
    assert follower is not None
    for end in (*leader, follower):
        end.close()
    assert connect(tmp_path) is None, "nobody listens any more"


@contextlib.contextmanager
def gathering(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A leader that waits for its follower; afterwards the list has how that ended."""
    monkeypatch.setenv(HOST_VARIABLE, "127.0.0.1")
    leader = Leader(complete({"num_nodes": 2}), run_dir, SignalWatch(), Mock())
    found: list[object] = []

    def gather() -> None:
        try:
            leader.gather()
            found.append(leader._followers[0].node)
        except ConfigError as error:
            found.append(str(error))

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    wait_until((run_dir / LEADER_FILE).exists, "the leader listens")
    yield found
    thread.join(30)


def test_who_connects_and_says_nothing_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_PART_SECONDS", 60)
    with contextlib.ExitStack() as stack, gathering(tmp_path, monkeypatch) as found:
        port = json.loads((tmp_path / LEADER_FILE).read_text())["port"]
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        follower = connect(tmp_path)
        assert follower is not None
        follower.send(Hello(1, "a host", started_with(complete({"num_nodes": 2}))))
    assert found == [1]


def test_a_node_that_cannot_follow_tells_the_leader_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with gathering(tmp_path, monkeypatch) as found:
        cfg = complete({"num_nodes": 2, "auto_device": False, "device": "cpu"})
        monkeypatch.setenv("ROBUST_TRAIN_NODE_RANK", "1")
        with pytest.raises(ConfigError, match="not_a_module"):
            follow("not_a_module.train", cfg, tmp_path)
    (refusal,) = found
    assert "node 1 (" in refusal
    assert "not_a_module" in refusal


def test_hosts_are_asked_in_the_order_of_their_machines(tmp_path: Path):
    """Containers on different machines may have one name, and on one machine several."""
    leader = Leader(complete({"num_nodes": 3}), tmp_path, SignalWatch(), Mock())
    order: list[object] = []
    for node, machine in ((1, "~"), (2, "")):
        connection = Mock(lost=None, receive=list)
        follower = _Follower(node, "a host", connection, machine, Reserved())
        connection.send = lambda message, node=node: order.append(node)
        leader._followers.append(follower)
    leader.acquire(lambda: order.append("own") or (), lambda: None)
    assert order == [2, "own", 1]


@pytest.mark.parametrize("key", ["training.epochs", "Python", "robust-train", "num_nodes"])
def test_what_has_to_be_the_same_is_compared(key: str):
    assert key in started_with(complete({"num_nodes": 2}))


BEGIN = Begin(3, AttemptSpec((), 8, 1, 2), "a job", 1234)


@pytest.fixture
def led(tmp_path: Path) -> tuple[Connection, Follower]:
    """The leader's end of a line, and who is at the other."""
    keys = {"num_nodes": 2, "auto_device": False, "device": "cpu"}
    follower = Follower("node_trainers.four_steps", complete(keys), tmp_path, Place(1, 2))
    leader, follower._connection = meet("a secret", "a secret")
    return leader, follower


def test_an_attempt_that_a_signal_forestalls_has_ended(led: tuple[Connection, Follower]):
    """Otherwise the leader would wait for its end, and take the node for lost."""
    leader, follower = led
    leader.send(BEGIN)
    follower._signals.received = signal.SIGTERM
    follower._follow()
    heard = leader.receive(1.0)
    assert heard[0] == Stop(signal.SIGTERM)
    (ended,) = (one for one in heard if isinstance(one, Ended))
    assert (ended.number, ended.failure.kind) == (3, FailureKind.INTERRUPTED)
    assert not ended.was_killed


def test_ranks_of_node_0_do_not_wait_for_those_that_ended_after_a_checkpoint(tmp_path: Path):
    connection, _ = meet("a secret", "a secret")
    leader = Leader(complete({"num_nodes": 2}), tmp_path, SignalWatch(), None)
    leader._followers, leader._grace_seconds = [_Follower(1, "a host", connection)], 20.0
    assert leader.poll_nodes() is None
    leader._followers[0].ended = Ended(1, Failure(FailureKind.INTERRUPTED, "…"))
    assert leader.poll_nodes() == 20.0
    leader._followers[0].ended = Ended(1, Failure(FailureKind.BUG, "…"))
    assert leader.poll_nodes() == 1.0


def test_an_order_to_end_is_about_the_attempt_before_it(
    led: tuple[Connection, Follower], monkeypatch: pytest.MonkeyPatch
):
    leader, follower = led
    seen = []

    def run(*about: object, others: Follower, **more: object) -> None:
        seen.append(others.poll_nodes())
        raise ConfigError("enough")

    monkeypatch.setattr(follower._executor, "run", run)
    for message in (End(3.0), BEGIN, End(5.0)):
        leader.send(message)
    follower._follow()
    leader.send(BEGIN)
    follower._follow()
    assert seen == [5.0, None]
