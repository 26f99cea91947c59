"""The line between two launchers, on this machine's loopback, and how a follower obeys."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import Mock

import pytest

from robust_train.config.schema import complete
from robust_train.errors import ConfigError, JobInterrupted
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import AttemptRequest
from robust_train.execution.signals import SignalWatch
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.nodes import connection as module
from robust_train.nodes import follow, follower
from robust_train.nodes import leader as leader_module
from robust_train.nodes.connection import (
    HOST_VARIABLE,
    LEADER_FILE,
    Address,
    Connection,
    connect,
    started_with,
)
from robust_train.nodes.follower import Follower
from robust_train.nodes.leader import Leader
from robust_train.nodes.messages import (
    Begin,
    Done,
    End,
    Ended,
    Hello,
    Message,
    Reserve,
    Reserved,
    Stop,
)
from robust_train.nodes.place import Place
from robust_train.values import AttemptSpec, Failure, FailureKind, Outcome
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
    monkeypatch.setattr(module, "PART_SECONDS", 1)
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


KEYS = {"num_nodes": 2, "auto_device": False, "device": "cpu"}


def leader_in(run_dir: Path, nodes: int = 2) -> Leader:
    """Node 0 of a job in this folder."""
    return Leader(complete({"num_nodes": nodes}), nodes, 3600, run_dir, SignalWatch(), Mock())


def follower_of(run_dir: Path, node: int, nodes: int = 2, machine: str = "") -> Connection:
    """A line to the leader in this folder, which this node has greeted."""
    line = wait_until(lambda: connect(run_dir), "the leader listens")
    started = started_with(complete({"num_nodes": nodes}))
    line.send(Hello(node, f"host-{node}", started, machine))
    return line


@pytest.fixture(autouse=True)
def on_the_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(HOST_VARIABLE, "127.0.0.1")


@contextlib.contextmanager
def gathering(run_dir: Path) -> Iterator[list[str]]:
    """A leader that waits for its follower; afterwards the list has how that ended."""
    leader = leader_in(run_dir)
    found: list[str] = []

    def gather() -> None:
        try:
            leader.gather()
            found.append("all are there")
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
    monkeypatch.setattr(module, "PART_SECONDS", 60)
    with contextlib.ExitStack() as stack, gathering(tmp_path) as found:
        port = json.loads((tmp_path / LEADER_FILE).read_text())["port"]
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        stack.callback(follower_of(tmp_path, 1).close)
    assert found == ["all are there"]


def test_a_node_that_cannot_follow_tells_the_leader_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with gathering(tmp_path) as found:
        cfg = complete(KEYS)
        monkeypatch.setenv("ROBUST_TRAIN_NODE_RANK", "1")
        with pytest.raises(ConfigError, match="not_a_module"):
            follow("not_a_module.train", cfg, tmp_path)
    (refusal,) = found
    assert "node 1 (" in refusal
    assert "not_a_module" in refusal


def test_hosts_are_asked_in_the_order_of_their_machines(tmp_path: Path):
    """Containers on different machines may have one name, and on one machine several."""
    order: list[object] = []
    lines: list[Connection] = []

    def reserve(node: int, machine: str) -> None:
        lines.append(line := follower_of(tmp_path, node, 3, machine))
        while line.receive(10) != [Reserve()]:
            assert line.lost is None
        order.append(node)
        line.send(Reserved())

    places = ((1, "~"), (2, ""))
    nodes = [threading.Thread(target=reserve, args=place, daemon=True) for place in places]
    for node in nodes:
        node.start()
    leader = leader_in(tmp_path, 3)
    leader.gather()
    leader.acquire(lambda: order.append("own") or (), lambda: None)
    assert order == [2, "own", 1]


@pytest.mark.parametrize("key", ["training.epochs", "Python", "robust-train", "num_nodes"])
def test_what_has_to_be_the_same_is_compared(key: str):
    assert key in started_with(complete({"num_nodes": 2}))


BEGIN = Begin(3, AttemptSpec((), 8, 1, 2), "a job", 1234)


def follow_one_that(leads: Callable[..., None], run_dir: Path) -> None:
    """Follow a leader that does this, then ends the job."""
    node_1 = Follower("node_trainers.four_steps", complete(KEYS), run_dir, Place(1, 2))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lead() -> None:
            line = Connection(listener.accept()[0], "a secret", leads=True)
            try:
                (greeting, *early) = line.receive(10)
                assert isinstance(greeting, Hello)
                leads(line, *early)
            finally:
                line.send(Done("completed", 0, None))

        with (
            Address(("127.0.0.1",), listener.getsockname()[1], "a secret").shown_in(run_dir),
            ThreadPoolExecutor(1) as thread,
        ):
            leader = thread.submit(lead)
            assert node_1.run().status == "completed"
            leader.result()


def next_of(line: Connection) -> Message:
    """The next message; the one after it is not on its way yet."""
    (message,) = line.receive(60)
    return message


def test_an_attempt_that_a_signal_forestalls_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the leader would wait for its end, and take the node for lost."""
    runs: list[object] = []

    def run(*about: object, **more: object) -> None:
        runs.append(about)
        signal.raise_signal(signal.SIGTERM)  # the ranks have not begun yet
        about[0].signals.raise_if_received()  # as the fork server does

    monkeypatch.setattr(ProcessExecutor, "run", run)

    def lead(line: Connection) -> None:
        for _ in range(2):
            line.send(BEGIN)
            ended = wait_until(lambda: next(filter(is_end, line.receive(1)), None), "it has ended")
            assert (ended.number, ended.failure.kind) == (3, FailureKind.INTERRUPTED)
            assert not ended.was_killed

    def is_end(message: Message) -> bool:
        assert message == Stop(signal.SIGTERM) or isinstance(message, Ended)
        return isinstance(message, Ended)

    follow_one_that(lead, tmp_path)
    assert len(runs) == 1, "none begins after the signal"


def test_a_signal_at_the_greeting_stops_the_job_and_costs_it_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def hello_and_a_signal(*about: object) -> Hello:
        signal.raise_signal(signal.SIGTERM)
        return module.hello(*about)

    monkeypatch.setattr(follower, "hello", hello_and_a_signal)

    def lead(line: Connection, *early: Message) -> None:
        assert (*early, *(early or line.receive(60)))[0] == Stop(signal.SIGTERM)

    follow_one_that(lead, tmp_path)


def test_the_leader_takes_what_comes_together_with_a_greeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    has_sent = threading.Event()

    class Late(Connection):
        def __init__(self, *about: object, **more: object) -> None:
            super().__init__(*about, **more)
            has_sent.wait(30)

    def greet_and_stop() -> Connection:
        line = follower_of(tmp_path, 1)
        line.send(Stop(signal.SIGTERM))
        has_sent.set()
        return line

    monkeypatch.setattr(leader_module, "Connection", Late)
    signals = Mock(received=None)
    leader = Leader(complete({"num_nodes": 2}), 2, 3600, tmp_path, signals, Mock())
    with ThreadPoolExecutor(1) as thread:
        there = thread.submit(greet_and_stop)
        leader.gather()
        there.result().close()
    signals.deliver.assert_called_once()


def test_a_signal_before_there_is_a_leader_ends_the_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(follower, "connect", lambda run_dir: signal.raise_signal(signal.SIGTERM))
    alone = Follower("node_trainers.four_steps", complete(KEYS), tmp_path, Place(1, 2))
    with pytest.raises(JobInterrupted):
        alone.run()


def test_ranks_of_node_0_do_not_wait_for_those_that_ended_after_a_checkpoint(tmp_path: Path):
    line: list[Connection] = []
    other = threading.Thread(target=lambda: line.append(follower_of(tmp_path, 1)), daemon=True)
    other.start()
    leader = leader_in(tmp_path)
    leader.gather()
    other.join(10)
    seconds: list[float | None] = []

    def train(request: AttemptRequest, *about: object, others: Leader, **more: object) -> Outcome:
        seconds.append(others.poll_nodes())
        for kind in (FailureKind.INTERRUPTED, FailureKind.BUG):
            line[0].send(Ended(request.attempt, Failure(kind, "…")))
            wait([*others.descriptors], 60)
            seconds.append(others.poll_nodes())
        return Outcome(None)

    with leader.over(Mock(run=train)):
        begin = AttemptRequest(
            TrainerRef("a.trainer"), complete({}), None, 1, tmp_path, None, {}, "", spec=BEGIN.spec
        )
        leader.run(begin, lambda event: None)
    assert seconds == [None, begin.stop_grace_seconds, 1.0]


def test_an_order_to_end_is_about_the_attempt_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen, has_begun = [], threading.Event()

    def run(*about: object, others: Follower, **more: object) -> None:
        seen.append(others.poll_nodes())
        has_begun.set()
        if len(seen) == 1:
            seen.append(wait_until(others.poll_nodes, "the order to end has come"))
        raise ConfigError("enough")

    monkeypatch.setattr(ProcessExecutor, "run", run)

    def lead(line: Connection) -> None:
        for message in (End(3.0), BEGIN):
            line.send(message)
        has_begun.wait(60)
        line.send(End(5.0))
        assert next_of(line) == Ended(3, refusal="enough")
        line.send(BEGIN)
        assert next_of(line) == Ended(3, refusal="enough")

    follow_one_that(lead, tmp_path)
    assert seen == [None, 5.0, None]
