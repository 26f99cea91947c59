"""The list of a user's runs, and which one is meant."""

import os
import shutil
from pathlib import Path

import pytest
from live_folder import another_launcher, as_on_another_host, change_json, open_folder

from robust_train.folder import run_list
from robust_train.folder.live import ControlError, ask
from robust_train.folder.run_list import (
    NoLiveRunError,
    choose_run,
    find_runs,
    read_run,
    register,
    state_directory,
)


def test_one_run_is_the_default_and_two_have_to_be_named(tmp_path):
    for which in (None, "~nobody/run"):  # a user who is not there
        with pytest.raises(NoLiveRunError, match="no run of yours"):
            choose_run(which)
    with open_folder(tmp_path / "one") as one:
        assert choose_run(None).id == one.state.id
        with open_folder(tmp_path / "two") as two:
            with pytest.raises(NoLiveRunError, match="2 runs of yours") as refusal:
                choose_run(None)
            listed = f"{one.state.id} ({tmp_path}/one), {two.state.id} ({tmp_path}/two)"
            assert listed in str(refusal.value)
            assert choose_run(two.state.id).run_dir == tmp_path / "two"
            assert choose_run(str(tmp_path / "one" / "requests")).id == one.state.id
            with pytest.raises(NoLiveRunError, match="means 2 runs"):
                choose_run(str(os.getpid()))
            with pytest.raises(NoLiveRunError, match=r"3-cccccc: no run .* alive are 0-"):
                choose_run("3-cccccc")


def test_a_run_keeps_its_earlier_ids(tmp_path):
    with open_folder(tmp_path) as folder:
        first = folder.state.id
        folder.queued(f"7-{folder.token}")
        assert choose_run(first).id == f"7-{folder.token}" == choose_run(f"7-{folder.token}").id


@pytest.mark.parametrize(
    ("name", "shown"), [(b"\xff", r"\udcff"), (b"two\nlines\x1b[2J", r"two\nlines\x1b[2J")]
)
def test_a_folder_whose_name_is_no_text_or_breaks_the_line_is_one_row(tmp_path, says, name, shown):
    with open_folder(tmp_path / os.fsdecode(name)):
        _, row = says("ps").out.splitlines()
        assert row.endswith(shown)


def test_a_clock_that_was_set_back_makes_no_state_shorter_than_nothing(tmp_path):
    with open_folder(tmp_path) as folder:
        change_json(tmp_path / "state.json", since=folder.state.since + 3600)
        assert choose_run(None).about()["seconds_in_state"] == 0


def test_a_folder_that_was_moved_or_linked_is_still_that_run(tmp_path):
    with open_folder(tmp_path / "before") as folder:
        (tmp_path / "before").rename(tmp_path / "after")
        (tmp_path / "link").symlink_to(tmp_path / "after")
        for which in ("after", "link", "link/lock"):
            run = choose_run(str(tmp_path / which))
            assert (run.id, run.run_dir) == (folder.state.id, tmp_path / "after")
            assert run.about()["run_dir"] == str(tmp_path / "after")


def test_a_job_of_another_host_on_the_same_disk_is_seen_and_answers(tmp_path):
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
        with pytest.raises(ControlError, match="no attempt runs"):
            ask(run, "checkpoint")
        assert ask(run, "stop")["after"] == "stopping"


def test_status_of_a_killed_launcher_says_died_with_its_last_state(tmp_path, says):
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
    assert f"robust-train resume {run.id} goes on" in says("checkpoint", run.id, code=1).err


def test_where_the_list_is(tmp_path, monkeypatch):
    assert state_directory({"ROBUST_TRAIN_STATE_DIR": "/here"}) == Path("/here")
    assert state_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/robust-train/runs")
    assert state_directory({"HOME": "/h"}) == Path("/h/.local/state/robust-train/runs")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without an entry
    assert state_directory({}) == Path("/.local/state/robust-train/runs")


def test_a_run_on_a_disk_that_is_not_mounted_stays_listed(tmp_path):
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


def test_the_list_stays_short_and_forgets_folders_that_are_gone(tmp_path, monkeypatch):
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


def test_a_run_that_goes_on_is_listed_at_each_moment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", str(tmp_path / "list"))
    folder, unlink, seen = tmp_path / "run", Path.unlink, []
    folder.mkdir()
    register(folder, "aaaaaa")

    def looked_at(link, missing_ok=False):
        unlink(link, missing_ok)
        seen.append([one.resolve() for one in link.parent.iterdir()])

    monkeypatch.setattr(Path, "unlink", looked_at)
    register(folder, "bbbbbb")
    assert seen == [[folder]]


def test_a_list_that_cannot_be_written_costs_a_line(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("ROBUST_TRAIN_STATE_DIR", "/proc/nowhere")
    with open_folder(tmp_path) as folder:
        assert choose_run(str(tmp_path)).id == folder.state.id
    (record,) = caplog.records
    assert "by its folder only" in record.getMessage()
