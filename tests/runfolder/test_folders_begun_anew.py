"""A run folder that was removed and begun anew while its job still ran belongs to the new job."""

import contextlib
import json

import pytest
from live_folder import open_folder

from robust_train import launch
from robust_train.folder.identity import read_identity
from robust_train.folder.live import new_request
from robust_train.folder.state import read_state
from robust_train.model.errors import RunFolderLostError
from robust_train.model.events import JobEnded


def begun_anew(run_dir):
    """The same folder with another job."""
    run_dir.rename(run_dir.with_name("away"))  # at once, whatever is written meanwhile
    return open_folder(run_dir, "the new job")


def test_the_old_job_spares_the_new_folder(tmp_path):
    """It writes nothing into it."""
    with contextlib.ExitStack() as stack:
        old_job = stack.enter_context(contextlib.ExitStack())
        old = old_job.enter_context(open_folder(tmp_path / "run", "the old job"))
        new = stack.enter_context(begun_anew(tmp_path / "run"))
        request = new_request(tmp_path / "run")
        request.write_text(json.dumps({"verb": "stop"}))
        with pytest.raises(
            RunFolderLostError, match=r"in use by the job of .* writes nothing more"
        ):
            old.tick()
        with pytest.raises(RunFolderLostError) as lost:
            old.record(JobEnded("completed"))
        old_job.push(lost.type)
        assert old.state.state == "failed"
        assert read_state(tmp_path / "run").id == new.state.id
        assert request.exists(), "it is made of the new job"
        assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_a_job_without_its_folder_ends_plainly(tmp_path):
    """It ends with one line after its folder was begun anew.

    The new job has begun before, in another folder, which takes this one's place: it is in the same
    process, and would take the signal by which a job without its folder stops its trainer.
    """
    run_dir = tmp_path / "run"

    def train(cfg, run):
        run_dir.rename(tmp_path / "away")
        (tmp_path / "new").rename(run_dir)
        run.progress(1, total_steps=1)

    with open_folder(tmp_path / "new", "the new job") as new:
        with pytest.raises(RunFolderLostError) as lost:
            launch(train, {"isolation": "none"}, run_dir=run_dir)
        assert lost.value.exit_code == 2
        assert read_identity(run_dir).id == new.beginning.job
        assert read_identity(run_dir).completed is None
        assert read_state(run_dir).name == "the new job"
        assert not (run_dir / "summary.json").exists()
