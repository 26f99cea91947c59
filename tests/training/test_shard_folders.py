"""Checkpoints of a sharded model, written by two processes and read by any number."""

import json
from pathlib import Path

import pytest

import preloaded
from robust_train.attempt.checkpoints import CheckpointFolder, read_newest
from robust_train.attempt.run import Run
from robust_train.folder.checkpoints import newest_checkpoint


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    program = Path(__file__).with_name("group_of_shard_writers.py").read_text()
    ended = preloaded.run(program, str(folder), cwd=Path(__file__).parent)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert all(seen["ranks"]), ended.stderr
    return {**seen, "folder": folder, "printed": ended.stdout, "log": ended.stderr}


def of_both(seen, part):
    """What both ranks have seen alike."""
    first, second = (rank[part] for rank in seen["ranks"])
    assert first.keys() == second.keys()
    return first


@pytest.mark.parametrize("part", ["in_the_background", "with_one_copy"])
def test_each_rank_writes_its_shards_while_training_goes_on(seen, part):
    """Also where only one of them has the memory for a copy."""
    background = of_both(seen, part)
    assert not background["reported early"]
    assert background["changed"]
    assert background["shards"]
    assert background["one process"]
    assert background["rows of a shard"] == 1500
    assert background["plain values"] == [[1]]
    assert background["names"] == ["step-00000001", "step-00000001.manifest.json"]
    shards = {"__0_0.distcp", "__1_0.distcp"}
    assert set(background["in it"]) == {".metadata", "index.pt", "values.pt", *shards}
    assert "torch.distributed is disabled" not in seen["log"]


def test_a_checkpoint_of_the_same_step_replaces_none(seen):
    saved = of_both(seen, "of_one_step")
    assert saved["twice"] == ["step-00000001", "step-00000001-again"]
    kept = ("step-00000001-again", "step-00000002")
    assert saved["then"] == sorted(name for one in kept for name in (one, one + ".manifest.json"))


def test_all_ranks_learn_that_one_has_no_space_and_can_go_on(seen):
    for rank in seen["ranks"]:
        full = rank["without_space"]
        assert [line.rpartition("step-00000002")[2] for line in full["said"]] == [
            ", rank 1: File too large",
            ", rank 0: File too large",
            ", rank 0: File too large",
        ]
        assert full["left"] == ["step-00000001", "step-00000001.manifest.json"]
        assert "step-00000003.manifest.json" in full["then"]


def test_a_rank_without_memory_to_write_is_known_to_all(seen):
    first, second = (rank["out_of_memory"] for rank in seen["ranks"])
    assert first == {"stack": True, "rank": 1, "left": []}
    assert second == {"stack": True, "rank": None, "left": []}


@pytest.mark.parametrize(
    "damage",
    [
        "a flipped byte in a shard",
        "a flipped byte in the index",
        "no shards of a rank",
        "code",
        "no values",
    ],
)
def test_a_damaged_folder_is_passed_over_on_all_ranks(seen, damage):
    first, second = (rank["damaged"] for rank in seen["ranks"])
    assert first["whole"] == [["step-00000002", 2], "step-00000002"]
    assert first[damage] == [["step-00000001", 1], "step-00000001"]
    assert second[damage] == [["step-00000001", 1], None]
    assert "code of a foreign file was run" not in seen["printed"]
    assert "Traceback" not in seen["log"]


def test_ranks_wait_for_a_checkpoint_that_a_network_disk_shows_later(seen):
    assert [rank["on_other_disks"] for rank in seen["ranks"]] == [1, 1]


def test_shards_are_read_from_a_file_of_whole_tensors(seen):
    for rank in seen["ranks"]:
        found = rank["from_a_file"]
        assert found["same"]
        assert found["held"] < 0.7 * found["file"]


def test_a_kill_before_the_folder_has_its_name_leaves_the_one_before(seen):
    assert seen["killed"][0] is None, "killed"
    assert seen["killed"][1]["said"] != "nothing"
    run = Run(run_dir=seen["folder"] / "killed")
    folder = CheckpointFolder(run, keep=2)
    torn = folder.path / ".step-00000002.tmp"
    assert (torn / "values.pt").exists()
    newest = newest_checkpoint(folder.path, "")
    found = read_newest(newest.path)
    assert found[1]["step"] == 1
    folder.remove_leftovers()
    assert not torn.exists()
