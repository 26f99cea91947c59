"""The list of a user's runs, and which one is meant."""

import os
import shutil
from pathlib import Path

import pytest
from live_folder import another_launcher, as_on_another_host, change_json, open_folder

from robust_train.folder import run_list
from robust_train.folder.identity import complete_job
from robust_train.folder.live import ControlError, ask
from robust_train.folder.run_list import (
    NoLiveRunError,
    NothingAliveError,
    choose_run,
    find_runs,
    read_run,
    register,
    state_directory,
)


def test_only_a_single_live_run_needs_no_name(tmp_path):
    """With two runs, the command has to name the run."""
    for which in (None, "~nobody/run"):  # a user who is not there
        with pytest.raises(NoLiveRunError, match="no run of yours"):
            choose_run(which)
    with open_folder(tmp_path / "one") as first:
        assert choose_run(None).id == first.state.id
        with open_folder(tmp_path / "two") as second:
            with pytest.raises(NoLiveRunError, match="2 runs of yours") as refusal:
                choose_run(None, command="stop")
            for folder in (first, second):
                assert f"\n  robust-train stop {folder.state.id}  starting" in str(refusal.value)
            assert choose_run(second.state.id).run_dir == tmp_path / "two"
            assert choose_run(str(tmp_path / "one" / "requests")).id == first.state.id
            with pytest.raises(NoLiveRunError, match="means 2 runs"):
                choose_run(str(os.getpid()))
            with pytest.raises(NoLiveRunError, match="means 2 runs"):
                choose_run(str(tmp_path), dead_too=True)
            with pytest.raises(NoLiveRunError, match=r"3-cccccc: no run of yours .* live runs:"):
                choose_run("3-cccccc")


@pytest.fixture
def started_in(tmp_path, monkeypatch):
    """Begin a job in a directory of this name, from where later commands are typed too."""

    def start(name):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        return open_folder(directory / f"run-{len(list(directory.iterdir()))}", name)

    return start


def test_the_default_is_the_last_of_this_directory(tmp_path, started_in, monkeypatch):
    with started_in("a"):
        pass
    with started_in("a") as last:
        pass
    with started_in("b") as elsewhere:
        monkeypatch.chdir(tmp_path / "a")
        only_live = choose_run(None, dead_too=True)
        assert only_live.id == elsewhere.state.id
    assert choose_run(None, dead_too=True).id == last.state.id
    with pytest.raises(
        NothingAliveError, match=f"the last run of this directory is {last.state.id}"
    ):
        choose_run(None)
    monkeypatch.chdir(only_live.run_dir)
    assert choose_run(None, dead_too=True).id == elsewhere.state.id
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoLiveRunError, match="no run was started in this directory") as refusal:
        choose_run(None, dead_too=True, command="logs")
    assert f"robust-train logs {last.state.id}" in str(refusal.value)


def test_this_directorys_only_live_run_is_chosen(started_in):
    """Others are alive elsewhere."""
    with started_in("a"), started_in("b") as here:
        assert choose_run(None).id == here.state.id
        with started_in("b"), pytest.raises(NoLiveRunError, match="2 runs of yours are alive"):
            choose_run(None)


def test_all_launches_of_a_job_share_its_id(tmp_path):
    """Its first digits and the identity in the journal find it; so does the id of a job that the
    folder had before.
    """
    with open_folder(tmp_path) as folder:
        first = folder.state.id
    with open_folder(tmp_path) as folder:
        assert folder.state.id == first
        job = folder.beginning.job
        for which in (first, first[:4], job):
            assert choose_run(which).id == first, which
        with pytest.raises(NoLiveRunError):
            choose_run(first[:3])
    complete_job(tmp_path, job)
    with open_folder(tmp_path) as folder:
        second = folder.state.id
        assert second != first
        for which in (first, job, second, folder.beginning.job):
            assert choose_run(which).id == second, which


@pytest.mark.parametrize(
    ("name", "shown"), [(b"\xff", r"\udcff"), (b"two\nlines\x1b[2J", r"two\nlines\x1b[2J")]
)
def test_unprintable_folder_names_take_one_row(tmp_path, says, name, shown):
    """A name that is not text, or that breaks the line."""
    with open_folder(tmp_path / os.fsdecode(name)):
        _, row = says("ps").out.splitlines()
        assert row.endswith(shown)


def test_a_clock_set_back_never_makes_times_negative(tmp_path):
    with open_folder(tmp_path) as folder:
        change_json(tmp_path / "state.json", since=folder.state.since + 3600)
        assert choose_run(None).about()["seconds_in_state"] == 0


def test_a_moved_or_linked_folder_stays_that_run(tmp_path):
    with open_folder(tmp_path / "before") as folder:
        (tmp_path / "before").rename(tmp_path / "after")
        (tmp_path / "link").symlink_to(tmp_path / "after")
        for which in ("after", "link", "link/lock"):
            run = choose_run(str(tmp_path / which))
            assert (run.id, run.run_dir) == (folder.state.id, tmp_path / "after"), which
            assert run.about()["run_dir"] == str(tmp_path / "after"), which


def test_another_hosts_job_is_seen_and_answers(tmp_path):
    """Its run folder is on the same disk."""
    with another_launcher(tmp_path / "theirs"):
        as_on_another_host(tmp_path / "theirs")
        run = choose_run(None)
        assert (run.alive, run.is_here) == (True, False)
        assert run.about()["host"] == "another-host.example"
        assert read_run(tmp_path / "theirs").status == "starting", "its pid says nothing here"
        with pytest.raises(NoLiveRunError):
            choose_run(str(run.pid))
        with open_folder(tmp_path / "ours") as ours:
            assert choose_run(None).id == ours.state.id, "the only one on this host"
        with pytest.raises(ControlError, match="no attempt can do this"):
            ask(run, "checkpoint")
        assert ask(run, "stop")["after"] == "stopping"


def test_a_killed_launcher_has_status_died(tmp_path, says):
    """Its last state is shown too."""
    with another_launcher(tmp_path) as process:
        run = read_run(tmp_path)
        assert (run.pid, run.status) == (process.pid, "starting")
        process.kill()
        process.wait()
        died = read_run(tmp_path)
        assert (died.alive, died.status) == (False, "died")
        assert died.about()["last_state"] == "starting"
    for which in (run.id, tmp_path, tmp_path / "state.json"):
        assert "died; the last state was starting" in says("status", which).out
    assert f"robust-train resume {run.id} continues" in says("checkpoint", run.id, code=1).err


def test_where_the_list_is(tmp_path, monkeypatch):
    assert state_directory({"ROBUST_TRAIN_STATE_DIR": "/here"}) == Path("/here")
    assert state_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/robust-train/runs")
    assert state_directory({"HOME": "/h"}) == Path("/h/.local/state/robust-train/runs")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without an entry
    assert state_directory({}) == Path("/.local/state/robust-train/runs")


def test_a_run_on_an_unmounted_disk_stays_listed(tmp_path):
    disk, unmounted = tmp_path / "disk", tmp_path / "unmounted"
    with open_folder(disk / "run") as folder:
        job = folder.state.id
    disk.rename(unmounted)
    disk.mkdir()  # an empty mount point
    assert find_runs() == []
    (tmp_path / "other").mkdir()
    register(tmp_path / "other", "aaaaaa")
    disk.rmdir()
    unmounted.rename(disk)
    assert [run.id for run in find_runs()] == [job]


def test_the_list_forgets_removed_folders(tmp_path, monkeypatch):
    """It stays short."""

    def listed():
        return [link.resolve() for link in sorted(state_directory().iterdir())]

    monkeypatch.setattr(run_list, "MOST_LINKS", 3)
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
        register(folder, "aaaaaa")
    register(folders[3], "aaaaaa")  # once more: one entry a folder
    assert listed() == [folders[2], folders[4], folders[3]]
    shutil.rmtree(folders[4])
    register(folders[0], "aaaaaa")
    assert listed() == [folders[2], folders[3], folders[0]]


def test_a_resuming_run_is_listed_at_each_moment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", str(tmp_path / "list"))
    folder, unlink, seen = tmp_path / "run", Path.unlink, []
    folder.mkdir()
    register(folder, "aaaaaa")

    def looked_at(link, missing_ok=False):
        unlink(link, missing_ok)
        seen.append([path.resolve() for path in link.parent.iterdir()])

    monkeypatch.setattr(Path, "unlink", looked_at)
    register(folder, "bbbbbb")
    assert seen == [[folder]]


def test_an_unwritable_list_costs_only_a_line(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", "/proc/nowhere")
    with open_folder(tmp_path) as folder:
        assert choose_run(str(tmp_path)).id == folder.state.id
    (record,) = caplog.records
    assert "by its folder only" in record.getMessage()
