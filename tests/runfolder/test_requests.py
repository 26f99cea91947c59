"""Requests as files, and those who misuse them. Real files, real other processes."""

import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_folder import another_launcher, open_folder

from another_user import ANOTHER_USER, needs_root
from robust_train.folder import live
from robust_train.folder.live import ControlError, StillQueuedError, ask
from robust_train.folder.requests import (
    REQUESTS,
    RefusedError,
    find_requests,
    open_requests,
    request_sweep_stop,
    sweep_stop_requested,
)
from robust_train.folder.run_list import choose_run, read_run
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import AttemptSpec
from world import wait_until

SPEC = AttemptSpec((), 8, 1)


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch):
    monkeypatch.setattr(live, "SEEN_SECONDS", 0.5)


@pytest.fixture
def inbox(tmp_path):
    open_requests(tmp_path)
    return tmp_path / REQUESTS


def test_the_oldest_request_is_taken_first(inbox):
    """It is taken once."""
    for name in ("2", "1"):
        (inbox / f"{name}.json").write_text('{"verb": "checkpoint"}')
    first, second = find_requests(inbox.parent)
    assert (first.path.stem, second.path.stem) == ("1", "2")
    assert first.take()
    assert not first.take()
    (inbox / "2.json").unlink()
    assert not second.take(), "it was withdrawn"
    first.answer({"answer": {"path": "čau"}})
    (answer,) = inbox.iterdir()
    assert json.loads(answer.read_text()) == {"answer": {"path": "čau"}}


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b'{"verb": 3}',
        b'{"verb": "a", "options": []}',
        b'{"verb": "a", "options": {"b": NaN}}',
        b"[" * 60_000,
    ],
    ids=lambda garbage: repr(garbage[:20]),
)
def test_garbage_is_called_so_and_removed(inbox, garbage, caplog):
    (inbox / "1.json").write_bytes(garbage)
    assert find_requests(inbox.parent) == []
    assert json.loads((inbox / "1.answer").read_text()) == {"error": "that is not a request"}
    assert not (inbox / "1.json").exists()
    assert "is refused: that is not a request" in caplog.text


def test_odd_request_files_neither_hang_nor_crash(inbox, tmp_path, caplog):
    """A request is a small regular file."""
    precious = tmp_path / "precious"
    precious.write_text('{"verb": "stop"}')
    os.mkfifo(inbox / "1.json")
    (inbox / "2.json").symlink_to(precious)
    (inbox / "3.json").write_bytes(b"x" * 70_000)
    (inbox / "4.json").mkdir()
    (inbox / "5.json").symlink_to("/dev/zero")
    assert find_requests(inbox.parent) == []
    assert precious.exists()
    assert list(inbox.glob("*.json")) == []
    assert len(caplog.records) == 5


@needs_root
def test_another_users_request_is_refused(tmp_path, caplog):
    """The refusal is one line."""
    folders = [tmp_path / name for name in ("of us", "of another")]
    for folder in folders:
        folder.mkdir()
        open_requests(folder)
    path = folders[0] / REQUESTS / "1.json"
    path.write_text('{"verb": "stop"}')
    (folders[0] / "sweep.json").write_text('{"sweep": "first"}')
    request_sweep_stop(folders[0])
    for theirs in (path, folders[0] / "stop.json", folders[1] / REQUESTS):
        os.chown(theirs, ANOTHER_USER, ANOTHER_USER)
    assert find_requests(folders[0]) == []
    assert not sweep_stop_requested(folders[0])
    assert caplog.text.count(f"it belongs to user {ANOTHER_USER}") == 2
    assert not path.exists()
    assert not (folders[0] / "stop.json").exists()
    with open_folder(folders[1]):
        assert "takes no requests" in caplog.text


def test_the_request_directory_is_private_and_cleared(inbox):
    """Others cannot open it; the start of a job clears it."""
    inbox.chmod(0o777)
    (inbox / "1.json").write_text('{"verb": "stop"}')
    (inbox / "2.taken").write_text('{"verb": "checkpoint"}')
    open_requests(inbox.parent)
    assert list(inbox.iterdir()) == []
    assert inbox.stat().st_mode & 0o777 == 0o700


def test_a_stopped_launcher_answers_no_request(tmp_path, says):
    """Who waits for it is told when it is killed."""
    with another_launcher(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: read_run(tmp_path).status == "does not answer", "it is stopped")
        assert f"fg or kill -CONT {process.pid} continues it" in says("status").out
        continued = rf"is stopped \(Ctrl-Z\): .* kill -CONT {process.pid}"
        for verb, wait_seconds in (("checkpoint", 0.1), ("stop", float("inf"))):
            with pytest.raises(ControlError, match=continued):
                ask(choose_run(None), verb, wait_seconds=wait_seconds)
        assert list((tmp_path / "requests").iterdir()) == [], "the request was withdrawn"
        run = choose_run(None)
        threading.Timer(0.3, process.kill).start()
        with pytest.raises(ControlError, match="has ended"):
            ask(run, "checkpoint", wait_seconds=600)
    assert list((tmp_path / "requests").iterdir()) == []


def test_a_taken_request_is_answered_by_the_end(tmp_path):
    """It is answered when the attempt that took it ends."""
    with open_folder(tmp_path) as folder:
        folder.record_attempt_start(Attempt(1, SPEC))
        run = choose_run(None)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(ask, run, "checkpoint", wait_seconds=600)
            (request,) = wait_until(lambda: find_requests(tmp_path), "it is there")
            assert request.take()
            failure = Failure(FailureKind.DEVICE_OOM, "memory ran out")
            folder.record_decision(Attempt(1, SPEC, failure=failure), None)
        assert str(asking.exception()) == f"{run.id}: the attempt ended first (device_oom)"


def test_an_untaken_request_waits_for_another_attempt(tmp_path):
    """If no attempt follows, the request is answered at the end of the job."""
    with open_folder(tmp_path) as folder:
        folder.record_attempt_start(Attempt(1, SPEC))
        with pytest.raises(StillQueuedError, match=r"no step has ended within 0\.1 s"):
            ask(choose_run(None), "checkpoint", wait_seconds=0.1)
        folder.record_decision(Attempt(1, SPEC), None)
        folder.tick()
        assert len(find_requests(tmp_path)) == 1
    (answer,) = (tmp_path / "requests").iterdir()
    assert "the run ended before it handled this request" in answer.read_text()


def test_a_removed_folder_is_an_ended_run(tmp_path):
    """The folder is removed while a command waits."""
    with open_folder(tmp_path / "run") as folder:
        folder.record_attempt_start(Attempt(1, SPEC))
        run = choose_run(None)
        threading.Timer(0.2, shutil.rmtree, [tmp_path / "run"]).start()
        with pytest.raises(ControlError, match="has ended"):
            ask(run, "checkpoint")


def test_requests_at_the_same_moment_are_all_answered(tmp_path):
    with open_folder(tmp_path) as folder:
        run, answers = choose_run(None), []

        def some():
            for _ in range(5):
                with pytest.raises(ControlError, match="no attempt can do this"):
                    ask(run, "checkpoint")
                answers.append(1)

        with ThreadPoolExecutor(6) as threads:
            asking = [threads.submit(some) for _ in range(6)]
            while not all(future.done() for future in asking):
                folder.tick()
    assert len(answers) == 30


def test_stopping_a_sweep_concerns_one_launch(tmp_path):
    assert not sweep_stop_requested(tmp_path)
    (tmp_path / "sweep.json").write_text('{"sweep": "first"}')
    request_sweep_stop(tmp_path)
    assert sweep_stop_requested(tmp_path)
    (tmp_path / "sweep.json").write_text('{"sweep": "second"}')
    assert not sweep_stop_requested(tmp_path)
    (tmp_path / "sweep.json").write_text('{"sweep": "second", "status": "ended"}')
    with pytest.raises(RefusedError, match="this sweep has ended"):
        request_sweep_stop(tmp_path)
