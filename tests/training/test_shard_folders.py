"""Checkpoints of a sharded model, written by two processes and read by any number."""

import json
import re
from pathlib import Path

import pytest

import warm
from robust_train.attempt.read_checkpoint import read_newest
from robust_train.attempt.run import Run, live_of
from robust_train.folder.checkpoints import newest_checkpoint

PROGRAM = Path(__file__).with_name("group_of_shard_writers.py").read_text()
PARTS = re.findall(r"(?ms)^    (\w+),$", PROGRAM.partition("\nPARTS")[2])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    ended = warm.preloaded(PROGRAM, str(folder), cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert all(seen["ranks"]), ended.stderr
    return {**seen, "folder": folder, "printed": ended.stdout, "log": ended.stderr}


@pytest.mark.parametrize("part", PARTS)
def test_of_both_ranks(seen, part):
    for rank in seen["ranks"]:
        assert not rank[part], rank[part]


def test_shards_load_silently_and_run_no_code(seen):
    """Nothing is said of what users cannot change, and no code of a foreign file is run."""
    assert "torch.distributed is disabled" not in seen["log"]
    assert "Traceback" not in seen["log"]
    assert "code of a foreign file was run" not in seen["printed"]


def test_an_early_kill_leaves_the_previous_folder(seen):
    """A kill before the new folder has its name."""
    first, second = seen["killed"]
    assert first is None, "killed"
    assert second is not None
    run = Run(run_dir=seen["folder"])
    torn = run.checkpoint_dir / ".step-00000002.tmp"
    assert (torn / "values.pt").exists()
    newest = newest_checkpoint(run.checkpoint_dir, "")
    checkpoint = read_newest(newest.path)
    assert checkpoint[1]["step"] == 1
    live_of(run).saves.folder(2).remove_leftovers(None)
    assert not torn.exists()
