"""The line between two launchers, on this machine's loopback."""

from __future__ import annotations

import json
import multiprocessing
import socket
import threading
from pathlib import Path

import pytest

from robust_train.config.schema import complete
from robust_train.nodes.connection import LEADER_FILE, Address, Connection, connect, started_with
from robust_train.nodes.messages import Message, Stop


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


def test_who_does_not_know_the_secret_is_not_taken_in():
    ends = meet("a secret", "another")
    assert not any(isinstance(end, Connection) for end in ends)


def test_the_leader_is_found_by_a_file_for_its_user_only(tmp_path: Path):
    assert connect(tmp_path) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        Address(("127.0.0.1",), port, "a secret").write(tmp_path)
        assert (tmp_path / LEADER_FILE).stat().st_mode & 0o777 == 0o600
        assert json.loads((tmp_path / LEADER_FILE).read_text())["port"] == port
        leader: list[Connection] = []
        serve = threading.Thread(
            target=lambda: leader.append(Connection(listener.accept()[0], "a secret", leads=True))
        )
        serve.start()
        follower = connect(tmp_path)
        serve.join()
    assert follower is not None
    for end in (*leader, follower):
        end.close()
    assert connect(tmp_path) is None, "nobody listens any more"


@pytest.mark.parametrize("key", ["training.epochs", "Python", "robust-train", "num_nodes"])
def test_what_has_to_be_the_same_is_compared(key: str):
    assert key in started_with(complete({"num_nodes": 2}))
