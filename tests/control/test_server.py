"""A run's socket and those who misuse it. Real sockets, a real thread, real other processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from control_world import Served, as_another_user, needs_root
from robust_train.control import clients
from robust_train.control.client import (
    ControlError,
    NoLiveRun,
    StillQueued,
    ask,
    choose_run,
    find_live_runs,
)
from world import wait_until

Serve = Callable[[str], Served]


def connected(served: Served) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(10)
    channel.connect(str(served.path))
    return channel


def said_to(served: Served, data: bytes) -> str:
    """What comes back for bytes that are sent as they are."""
    with connected(served) as channel:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := channel.recv(1 << 16):
                answer += data
    return answer.decode()


def test_a_question_is_answered(serve: Serve):
    run = serve("1-aaaaaa").run()
    assert ask(run, "echo", text="čau") == {"text": "čau"}
    with pytest.raises(ControlError, match="1-aaaaaa: not today"):
        ask(run, "refuse")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"\xff\xfe\x00\n",
        b"[]\n",
        b'{"verb": 3}\n',
        b'{"verb": "echo", "options": []}\n',
        b'{"verb": "echo", "wait": "long"}\n',
        b'{"verb": "echo", "wait": NaN}\n',
        b"[" * 60_000 + b"\n",
        b'{"verb": "echo", "options": {"a": ' + b"[" * 30_000 + b"\n",
    ],
    ids=repr,
)
def test_garbage_is_called_so_and_harms_nobody(serve: Serve, garbage: bytes):
    served = serve("1-aaaaaa")
    assert "that is no request" in said_to(served, garbage)
    assert ask(served.run(), "echo", a=1) == {"a": 1}


def test_a_huge_message_is_refused_before_it_is_read_to_its_end(serve: Serve):
    served = serve("1-aaaaaa")
    answer = said_to(served, b"x" * 10_000_000)
    assert answer == "" or "at most 65536 bytes" in answer  # the rest may reset the connection
    assert ask(served.run(), "echo", a=1) == {"a": 1}


def test_an_answer_that_is_too_long_says_so(serve: Serve):
    served = serve("1-aaaaaa")
    line = json.dumps({"verb": "echo", "options": {"text": '"' * 60_000}}) + "\n"
    assert len(line) > 65536 or "too long" in said_to(served, line.encode())
    short = {"verb": "echo", "options": {"text": "\x00" * 10_000}}  # six bytes each as JSON
    assert len(said_to(served, json.dumps(short).encode() + b"\n")) > 60_000


def test_who_asks_in_pieces_is_answered_and_who_asks_half_is_dropped(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clients, "_ASKING_SECONDS", 1.0)
    served = serve("1-aaaaaa")
    with connected(served) as silent, connected(served) as slow:
        for byte in b'{"verb": "who"}\n':
            slow.sendall(bytes([byte]))
        slow.shutdown(socket.SHUT_WR)  # it says no more, but still listens
        assert b"1-aaaaaa" in slow.recv(4096)
        silent.sendall(b'{"verb": ')
        assert silent.recv(4096) == b"", "who never finishes is not waited for"


def test_who_does_not_take_the_answer_is_dropped_and_blocks_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clients, "_TAKING_SECONDS", 1.0)
    served = serve("1-aaaaaa")
    request = json.dumps({"verb": "echo", "options": {"text": "é" * 10_000}}).encode() + b"\n"
    readers = []
    for _ in range(5):
        channel = socket.socket(socket.AF_UNIX)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        channel.connect(str(served.path))
        channel.sendall(request)
        readers.append(channel)
    assert ask(served.run(), "echo", a=1) == {"a": 1}
    wait_until(lambda: not served.server._clients._all, "all are dropped")
    for channel in readers:
        channel.close()


def test_many_clients_at_once_are_all_answered(serve: Serve):
    served = serve("1-aaaaaa")
    run, answers = served.run(), []

    def some(first: int) -> None:
        answers.extend(ask(run, "echo", number=n)["number"] for n in range(first, first + 20))

    threads = [threading.Thread(target=some, args=(20 * n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(200))


def test_connections_that_are_held_open_shut_nobody_out_for_long(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clients, "_ASKING_SECONDS", 1.0)
    served = serve("1-aaaaaa")
    run = served.run()
    held = []
    while len(held) < 32:
        with contextlib.suppress(BlockingIOError):  # more at once than the backlog holds
            held.append(connected(served))
    wait_until(lambda: len(served.server._clients._all) == 32, "all are in")
    with pytest.raises(ControlError, match="try later"):
        ask(run, "echo", a=1)
    wait_until(lambda: not served.server._clients._all, "they are dropped")
    assert ask(run, "echo", a=1) == {"a": 1}
    for channel in held:
        channel.close()


@needs_root
def test_another_user_cannot_connect_and_is_refused_even_if_he_could(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    served = serve("1-aaaaaa")
    code = """
import contextlib, socket
with socket.socket(socket.AF_UNIX) as channel:
    channel.connect(arguments[0])
    with contextlib.suppress(BrokenPipeError):  # it need not have been let speak
        channel.sendall(b'{"verb": "who"}\\n')
    print(channel.recv(4096).decode())
"""
    folder = served.path.parent
    while folder != Path("/"):  # the directory alone must keep him out, not those above it
        if folder != served.path.parent:
            folder.chmod(folder.stat().st_mode | 0o055)
        folder = folder.parent
    status, said = as_another_user(code, str(served.path))
    assert (status, said) == (1, ""), "the directory lets others in"
    served.path.parent.chmod(0o755)
    status, said = as_another_user(code, str(served.path))
    assert (status, said) == (1, ""), "the socket lets others in"
    served.path.chmod(0o666)
    status, said = as_another_user(code, str(served.path))
    assert status == 0
    assert json.loads(said) == {"error": "this run belongs to user 0"}
    assert "user 65534 was refused" in caplog.text


def test_one_run_is_the_default_and_two_have_to_be_named(serve: Serve):
    with pytest.raises(NoLiveRun, match="no run of yours is alive"):
        choose_run(None)
    serve("1-aaaaaa")
    assert choose_run(None).id == "1-aaaaaa"
    serve("2-bbbbbb")
    with pytest.raises(NoLiveRun, match="2 runs of yours") as refusal:
        choose_run(None)
    assert "1-aaaaaa (/runs/1-aaaaaa), 2-bbbbbb (/runs/2-bbbbbb)" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert choose_run("2-bbbbbb").id == "2-bbbbbb"
    assert choose_run("/runs/1-aaaaaa/checkpoints/step-1.pt").id == "1-aaaaaa"
    with pytest.raises(NoLiveRun, match="means 2 runs"):
        choose_run(str(os.getpid()))
    with pytest.raises(NoLiveRun, match=r"3-cccccc: no live run .* alive are 1-aaaaaa"):
        choose_run("3-cccccc")


_ANOTHER_RUN = """
import os, sys, time
from control_world import Served
served = Served("7-dddddd")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def another_run():
    """The process of a run that only serves its socket."""
    tests = Path(__file__).resolve().parents[1]
    path = f"{tests}:{tests.parent / 'src'}"
    process = subprocess.Popen(
        [sys.executable, "-c", _ANOTHER_RUN],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_run_left_is_recognised_and_removed(another_run: subprocess.Popen[bytes]):
    run = choose_run(None)
    assert run.pid == another_run.pid
    assert run.socket_path.exists()
    another_run.kill()
    another_run.wait()
    with pytest.raises(ControlError, match="has ended"):
        ask(run, "echo")
    assert run.socket_path.exists()
    assert find_live_runs() == []
    assert not run.socket_path.exists()


def test_a_stopped_run_is_listed_as_one_that_does_not_answer(
    another_run: subprocess.Popen[bytes],
):
    another_run.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{another_run.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
    (run,) = find_live_runs()
    assert (run.pid, run.state) == (another_run.pid, "does not answer")
    another_run.send_signal(signal.SIGCONT)
    assert choose_run(str(another_run.pid)).state == "waiting"


def test_a_socket_that_a_cleaner_removed_is_made_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clients, "_LOOK_AGAIN_SECONDS", 0.2)
    served = serve("1-aaaaaa")
    served.path.unlink()
    served.path.parent.rmdir()
    wait_until(lambda: [run.id for run in find_live_runs()] == ["1-aaaaaa"], "it is back")


def test_the_socket_goes_with_its_run(serve: Serve):
    served = serve("1-aaaaaa")
    assert served.path.exists()
    served.server.close()
    assert not served.path.exists()
    served.server.detach()  # who tells a closed server something writes into no other file


def test_a_fork_does_not_keep_the_socket_alive(serve: Serve):
    served = serve("1-aaaaaa")
    run = served.run()
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    try:
        served.server.close()
        with pytest.raises(ControlError, match="has ended"):
            ask(run, "echo")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def packets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(20)
    return ours, theirs


def test_who_asks_an_attempt_that_takes_its_time_hears_that_it_is_queued(serve: Serve):
    served = serve("1-aaaaaa")
    run = served.run()
    with pytest.raises(ControlError, match="no attempt runs that could do that: the run is wait"):
        ask(run, "checkpoint")
    ours, theirs = packets()
    served.server.attach(ours)
    with pytest.raises(StillQueued, match=r"no step has ended within 0\.1 s; the request stays"):
        ask(run, "checkpoint", wait_seconds=0.1)
    asked = json.loads(theirs.recv(4096))
    assert asked["verb"] == "checkpoint"
    # its late answer interests nobody, and the next one is not mistaken for it
    theirs.send(json.dumps({"number": asked["number"], "answer": {"late": True}}).encode())
    done = []
    asking = threading.Thread(target=lambda: done.append(ask(run, "halve_batch")))
    asking.start()
    asked = json.loads(theirs.recv(4096))
    theirs.send(json.dumps({"number": asked["number"], "answer": {"late": False}}).encode())
    asking.join()
    assert done == [{"late": False}]


def test_who_waits_for_an_attempt_that_dies_is_told(serve: Serve):
    served = serve("1-aaaaaa")
    run = served.run()
    ours, theirs = packets()
    served.server.attach(ours)
    problems = []

    def wait_for_it() -> None:
        with pytest.raises(ControlError) as refusal:
            ask(run, "checkpoint", wait_seconds=600)
        problems.append(str(refusal.value))

    asking = threading.Thread(target=wait_for_it)
    asking.start()
    theirs.recv(4096)
    theirs.close()
    asking.join()
    assert problems == ["1-aaaaaa: the attempt ended before it came to that"]


def test_status_does_not_wait_for_an_attempt_that_hangs(serve: Serve):
    served = serve("1-aaaaaa")
    run = served.run()
    ours, theirs = packets()
    served.server.attach(ours)
    assert ask(run, "status")["id"] == "1-aaaaaa"
    theirs.close()


def test_the_thread_sleeps_while_nobody_asks(serve: Serve):
    served = serve("1-aaaaaa")
    with connected(served) as gone:
        gone.sendall(b'{"verb": "checkpoint", "wait": 600}\n')
    ours, theirs = packets()
    served.server.attach(ours)
    with connected(served) as waiting:
        waiting.sendall(b'{"verb": "checkpoint", "wait": 600}\n')
        theirs.recv(4096)
    # both clients are gone, one with a request that waits: nothing of that may keep it busy
    assert served.server._thread.native_id is not None
    stat = Path(f"/proc/self/task/{served.server._thread.native_id}/stat")

    def ticks() -> int:
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(1.0)
    assert ticks() - before <= 2, "in ticks of 10 ms"
    theirs.close()
