"""``robust-train ps``, ``logs`` and ``wait``, in this process, on folders as jobs leave them."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
import time

import pytest
from live_folder import another_launcher, died, ended, open_folder

from robust_train.cli import output, ps
from robust_train.folder.lock import RunLock
from robust_train.folder.run_list import state_directory
from robust_train.sweep.record import Status, SweepJob, SweepTable, read_rows


def test_cleaning_removes_only_old_files_of_jobs(tmp_path, says):
    """What is not the job's stays."""
    for name, status in (("a", "completed"), ("b", "failed"), ("mine", "completed")):
        ended(tmp_path / name, name, status)
    thesis = tmp_path / "mine" / "thesis.tex"
    thesis.touch()
    os.utime(thesis, (0, 0))
    assert "30 days ago" in says("rm").out
    assert "--yes" in says("rm", "--days", 0, code=2).err
    answer = json.loads(says("rm", "--days", 0, "--yes", "--json").out)
    assert [run["run_dir"] for run in answer["runs"]] == [str(tmp_path / "a")]
    assert answer["kept"] == [f"{thesis.parent} stays: {thesis} is older than the job"]
    assert [(tmp_path / name).exists() for name in ("a", "b", "mine")] == [False, True, True]
    says("rm", "--days", 0, "--yes", "--all")
    assert [(tmp_path / name).exists() for name in ("b", "mine")] == [False, True]


def test_a_job_starting_during_clean_keeps_its_folder(tmp_path, says, monkeypatch):
    """It starts while ``clean`` asks."""
    for name in ("a", "b"):
        ended(tmp_path / name, name, "completed")
    (tmp_path / "b" / "journal.jsonl").write_text('{"time": "noon"}\n')
    with contextlib.ExitStack() as again:

        def answer(question):
            again.enter_context(open_folder(tmp_path / "a", "again"))
            return "y"

        monkeypatch.setattr("builtins.input", answer)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        shown = says("rm", "--days", 0)
    assert "removed 1 run folder, " in shown.out
    assert shown.err == f"warning: {tmp_path / 'a'} stays: a job runs in it\n"
    assert [(tmp_path / name).exists() for name in ("a", "b")] == [True, False]


def test_the_newest_run_is_listed_last(tmp_path, says):
    """The command that resumes it is in its row."""
    first = ended(tmp_path / "a", "lora", "completed", {"objective": 0.875, "more": [1]})
    second = ended(tmp_path / "b", "probe", "failed", reason="it broke")
    third = died(tmp_path / "c", with_the_host=True)
    ended(tmp_path / "gone", "gone", "completed")
    shutil.rmtree(tmp_path / "gone")
    with open_folder(tmp_path / "d", "alive") as live:
        lines, only_live = (says("ps", *more).out.splitlines() for more in ([], ["--live"]))
        listed = json.loads(says("ps", "--json").out)["runs"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        [first, "completed"],
        [second, "failed"],
        [third, "died"],
        [live.state.id, "starting"],
    ]
    assert "0.875" in lines[1]
    how = f"to continue: robust-train resume {third}"
    assert lines[5:] == [f"{third} died: the host went down; {how}"]
    assert [line.split()[0] for line in only_live] == ["id", live.state.id]
    assert [run["state"] for run in listed] == ["starting", "died", "failed", "completed"]
    assert listed[3]["result"] == 0.875


def test_all_commands_choose_the_same_unnamed_run(tmp_path, says):
    """The last of this directory if none is alive; ``stop`` refuses to stop what has ended."""
    job = ended(tmp_path / "a", "lora", "completed")
    (tmp_path / "a" / "attempt-1.log").write_text("its output\n")
    assert f"run      {job}\n" in says("status").out
    assert says("logs").out == "its output\n"
    assert says("attach").out == f"its output\n{job} completed; {tmp_path / 'a'}\n"
    assert says("wait").out == f"{job} completed; {tmp_path / 'a'}\n"
    assert says("report").out == f"{tmp_path / 'a' / 'report.html'}\n"
    assert f"{job} has completed: nothing is left to do" in says("resume", code=1).err
    assert f"the last run of this directory is {job}, completed" in says("stop", code=1).err


def test_a_sweeps_name_is_always_its_folder(tmp_path, says):
    """All commands accept it."""
    sweep = tmp_path / "sweep"
    jobs = [died(sweep / number) for number in ("0", "1")]
    for number in (0, 1):
        SweepJob(number, (f"lr={number}",), "id", folder=str(sweep / str(number))).write(
            sweep / str(number)
        )
    SweepTable("id", "gpu_queue").write(sweep)
    (sweep / "1" / "attempt-1.log").write_text("its output\n")
    for which in (sweep, sweep / "sweep.json"):
        shown = says("status", which).out
        assert shown.startswith(f"{sweep}: died\n"), which
        assert f"to continue: robust-train resume {sweep}" in shown
        assert [line.split()[-1] for line in shown.splitlines()[2:4]] == ["lr=0", "lr=1"], which
        assert says("wait", which, code=1).out.startswith(f"{sweep}: died")
    assert says("logs", sweep).out == "its output\n"
    assert jobs[1] in says("stop", sweep / "1", code=1).err


def test_an_unresumable_sweep_is_named_once(tmp_path, says):
    """Its jobs are not named in addition to it."""
    for number in ("0", "1"):
        died(tmp_path / "sweep" / number)
    SweepTable("id", "gpu_queue").write(tmp_path / "sweep")
    (line,) = says("resume", "--all").err.splitlines()
    assert f" is not resumed: {tmp_path / 'sweep'}: sweep.json names no command" in line
    command = "cd /there && python train.py hydra.sweep.dir=/there/sweep"
    SweepTable("id", "gpu_queue", resume_command=command).write(tmp_path / "sweep")
    (line,) = says("resume", "--all").err.splitlines()
    assert f"{tmp_path / 'sweep'}: the sweep was started in another folder" in line


def test_of_many_runs_the_newest_are_shown(tmp_path, says, monkeypatch):
    monkeypatch.setattr(ps, "USUALLY", 1)
    for name in ("one", "two"):
        ended(tmp_path / name, name, "completed")
    for more, words in ((), ("two", "older: 1; --all shows them")), (("--all",), ("one",)):
        out = says("ps", *more).out
        assert all(word in out for word in words)


def test_logs_shows_the_last_or_named_attempt(tmp_path, says):
    ended(tmp_path / "a", "lora", "completed")
    (tmp_path / "a" / "attempt-2.log").write_bytes(b"early\n")
    (tmp_path / "a" / "attempt-10.log").write_bytes(b"late \xff\nno end")
    for arguments in ([], ["lora", "-f"]):
        assert says("logs", *arguments).out == "late \\xff\nno end"
    assert says("logs", tmp_path / "a", "--attempt", 2).out == "early\n"
    no_log = says("logs", "lora", "--attempt", 3, code=1)
    assert "no log of attempt 3; attempts with a log: 2, 10" in no_log.err
    ended(tmp_path / "b", "probe", "no_device", reason="no GPU in time")
    assert "has started no attempt: no GPU in time" in says("logs", "probe", code=1).err
    says("logs", "nothing", code=1)


def test_logs_follows_whole_lines_to_the_end(tmp_path):
    """It follows them through all attempts until the job ends."""
    with open_folder(tmp_path) as folder:
        shown = output.read_output(tmp_path, follow=True)
        assert next(shown) == b"", "no attempt yet"
        first, second = (tmp_path / f"attempt-{number}.log" for number in (1, 2))
        first.write_bytes(b"one\xff\ntw")
        assert next(shown) == b"one\xff\n"
        first.write_bytes(b"one\xff\ntwo\nunfinished")
        assert next(shown) == b"two\n"
        second.write_bytes(b"again")
        assert next(shown) == b"unfinished"
        assert next(shown) == b"\n==> attempt 2 <==\n"
        assert list(output.read_output(tmp_path, 1, follow=True)) == [
            b"one\xff\ntwo\nunfinished"
        ], "ended"
        second.write_bytes(b"." * output.CHUNK_BYTES + b"again")
        assert len(next(shown)) == output.CHUNK_BYTES, "a line without an end does not hold it up"
        folder.record_end("completed", None)
    assert list(shown) == [b"again"]


def test_attach_follows_the_log_until_the_end(tmp_path, says, monkeypatch):
    """It returns when the job ends."""
    monkeypatch.setattr(output, "POLL_SECONDS", 0.0)
    assert "no run of yours is alive" in says("attach", code=1).err
    with open_folder(tmp_path, "lora") as folder:
        (tmp_path / "attempt-1.log").write_text("old\n" * 2000 + "now\n")
        ticks = iter(range(3))

        def sleep(seconds):
            if next(ticks) == 1:
                folder.record_end("interrupted", "interrupted by SIGTERM", 143)
                folder.__exit__(None, None, None)

        monkeypatch.setattr("robust_train.cli.output.time.sleep", sleep)
        out = says("attach", "lora", code=143).out
    assert out.startswith(f"attached to {folder.state.id}; Ctrl-C")
    assert len(out) < 5000
    assert "now\n" in out
    assert "interrupted by SIGTERM" in out


def test_wait_returns_the_first_failures_exit_code(tmp_path, says):
    """It is the code of the first job that did not complete."""
    ended(tmp_path / "a", "lora", "completed")
    ended(tmp_path / "b", "probe", "interrupted", reason="interrupted by SIGTERM", code=143)
    died(tmp_path / "c")
    says("wait", "lora")
    out = says("wait", "lora", "probe", "clip", code=143).out
    assert "interrupted: interrupted by SIGTERM" in out
    says("wait", code=1)  # the newest one died
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "lock").touch()
    SweepTable("x", "basic", "ended", 75).write(sweep)
    says("wait", sweep, code=75)
    says("wait", "nothing", code=1)


def test_wait_works_on_disks_without_locks(tmp_path, says, monkeypatch):
    """It waits for a sweep."""

    def no_locks(fd, *arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    sweep, seen = tmp_path / "sweep", []
    with open_folder(sweep / "0", "lora"):
        SweepJob(0, (), "x", Status.STARTED).write(sweep / "0")
        RunLock(sweep, "x")
        SweepTable("x", "basic").write(sweep)

        def end(seconds):
            seen.extend(row.status for row in read_rows(sweep, "x"))
            SweepTable("x", "basic", "ended", 75).write(sweep)

        monkeypatch.setattr(time, "sleep", end)
        says("wait", sweep, code=75)
    assert seen == ["starting"]


@pytest.mark.slow
def test_wait_waits(tmp_path, says):
    with another_launcher(tmp_path / "live") as process:
        threading.Timer(0.5, process.terminate).start()
        says("wait", code=143)


def test_empty_lists_say_where_runs_may_be(says):
    for more, which in (["--live"], "alive"), ([], "on the list"):
        assert says("ps", *more).out == f"no run of yours is {which} in {state_directory()}\n"
