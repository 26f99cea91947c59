"""What a run does about its memory, says of it, and leaves when it runs out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_world import ON_CPU, run
from torch import nn

from robust_train.attempt.memory_upkeep import AttemptMemory
from robust_train.attempt.run import MicroBatchPlan, Run
from robust_train.config.schema import MemoryConfig, RobustConfig
from robust_train.folder.memory_samples import FILE_NAME, Sample, attempt_stability, encode
from robust_train.model.events import Event, MemoryTight, OutOfMemory
from robust_train.model.failure import FailureKind
from robust_train.readable import MIB
from world import Ended, World


def events(ended: Ended, name: str) -> list[dict[str, Any]]:
    return [event for event in ended.journal if event["event"] == name]


def written_down(ended: Ended, attempt: int = 1) -> dict[str, Any]:
    return json.loads((ended.run_dir / f"oom-attempt-{attempt}.json").read_text())


@pytest.mark.parametrize("isolation", ["process", pytest.param("none", marks=pytest.mark.slow)])
def test_epochs_milestones_and_the_final_clean_up_are_in_log_and_journal(own_trainers, isolation):
    ended = run(
        own_trainers,
        "ends_epochs",
        *ON_CPU,
        f"isolation={isolation}",
        "memory.log_frequency=2",
        "memory.fraction=0.5",
        "memory.sample_interval_ms=0",
    )
    assert ended.returncode == 0, ended.output
    [cleared] = events(ended, "memory_cleared")
    assert (cleared["reason"], cleared["of"], cleared["attempt"]) == ("end", "resident", 1)
    returned = ended.attempts[0]["memory_returned"]
    assert returned == {key: cleared[key] for key in returned}
    assert returned["returned_bytes"] == max(returned["before_bytes"] - returned["after_bytes"], 0)
    assert returned["seconds"] > 0
    epochs = [(e["epoch"], e["step"], e["metrics"]["val_loss"]) for e in events(ended, "epoch")]
    assert epochs == [(1, 3, 0.5), (2, 6, 0.25)]
    milestones = [event["milestone"] for event in events(ended, "memory")]
    assert milestones == ["step 2", "step 4", "step 6"]
    assert "step 4: host memory: " in ended.output
    assert ended.output.count("memory.fraction=0.5: has no effect on the CPU") == 1
    assert not (ended.run_dir / FILE_NAME).exists()
    assert ended.attempts[0]["memory_stability"] is None


@pytest.mark.parametrize("isolation", ["process", pytest.param("none", marks=pytest.mark.slow)])
def test_what_fills_the_memory_is_written_down_while_the_failed_functions_hold_it(
    own_trainers, isolation
):
    ended = run(
        own_trainers,
        "runs_out_in_a_function",
        *ON_CPU,
        f"isolation={isolation}",
        "min_batch_size=64",
        "training.num_workers=0",
    )
    assert ended.returncode == 1, ended.output
    found = written_down(ended)
    largest = found["tensors"][:3]
    assert [t["bytes"] / 2**20 for t in largest] == [20, 16, 12]
    assert [t["shape"] for t in largest] == [[5 * 2**20], [4 * 2**20], [3 * 2**20]]
    assert {(t["dtype"], t["device"]) for t in largest} == {("float32", "cpu")}
    assert (found["attempt"], found["step"], found["kind"]) == (1, 7, "host_oom")
    [event] = events(ended, "out_of_memory")
    assert event["tensors"] == "oom-attempt-1.json"
    assert event["snapshot"] is None
    assert (event["attempt"], event["step"]) == (1, 7)
    assert (
        "out of memory: the largest tensors are 20.0 MiB float32 (5242880,) on cpu" in ended.output
    )
    assert "memory.fraction" not in ended.output
    # the failure is the trainer's own
    assert "can't allocate memory" in ended.attempts[0]["message"]
    # a process that ends anyway returns its memory by that
    reasons = [event["reason"] for event in events(ended, "memory_cleared")]
    assert reasons == (["failure"] if isolation == "none" else [])


def test_running_out_inside_a_step_is_written_down_once_an_attempt(own_trainers: World):
    ended = run(own_trainers, "recovers_inside_two_steps", *ON_CPU, "training.batch_size=64")
    assert ended.returncode == 0, ended.output
    assert ended.summary["result"] == "recovered"
    assert len(events(ended, "micro_batch_changed")) > 1
    assert len(events(ended, "out_of_memory")) == 1
    assert written_down(ended)["tensors"]


def test_memory_that_is_full_to_the_last_byte_leaves_room_to_record_it(own_trainers: World):
    ended = run(
        own_trainers,
        "fills_the_memory_to_the_last_byte",
        *ON_CPU,
        "min_batch_size=64",
        "memory.sample_interval_ms=0",
    )
    assert ended.returncode == 1, ended.output
    assert ended.attempts[0]["outcome"] == "host_oom"
    assert len(events(ended, "out_of_memory")) == 1
    assert written_down(ended)["kind"] == "host_oom"


@pytest.mark.parametrize(
    ("error", "setting", "files"),
    [
        (MemoryError(), True, ["oom-attempt-1.json"]),
        (MemoryError(), False, []),
        (KeyError("no matter of memory"), True, []),
    ],
)
def test_nothing_is_written_down_for_a_bug_or_where_it_is_turned_off(
    tmp_path, error, setting, files
):
    reported: list[Event] = []
    settings = RobustConfig(
        device="cpu", memory=MemoryConfig(snapshot_on_oom=setting, sample_interval_ms=0)
    )
    keeper = AttemptMemory(Run(run_dir=tmp_path, report=reported.append), settings)
    with pytest.raises(type(error)), keeper:
        raise error
    assert [path.name for path in tmp_path.glob("oom-*")] == files
    assert len([event for event in reported if isinstance(event, OutOfMemory)]) == len(files)


def test_a_record_that_cannot_be_written_costs_a_warning_and_hides_nothing(tmp_path, caplog):
    caplog.set_level("INFO", "robust_train")
    (tmp_path / "oom-attempt-1.json").mkdir()  # a folder where the file should be
    reported: list[Event] = []
    settings = RobustConfig(device="cpu", memory=MemoryConfig(sample_interval_ms=0))
    error = MemoryError("the trainer's own")
    held = torch.empty(2**20)
    with (
        pytest.raises(MemoryError) as raised,
        AttemptMemory(Run(run_dir=tmp_path, report=reported.append), settings),
    ):
        raise error
    assert raised.value is error
    [event] = [event for event in reported if isinstance(event, OutOfMemory)]
    assert (event.kind, event.tensors) == (FailureKind.HOST_OOM, None)
    warned, *told = caplog.messages
    assert warned.startswith(f"cannot write {tmp_path}/oom-attempt-1.json: ")
    assert f"float32 ({held.numel()},)" in told[0], "the log has the largest nevertheless"
    assert "all in" not in told[0]


@pytest.mark.parametrize("shrinks", [False, True])
def test_an_allocator_that_empties_its_cache_step_after_step_is_a_warning(
    tmp_path, caplog, shrinks
):
    reported: list[Event] = []
    run = Run(run_dir=tmp_path, report=reported.append)
    run.micro_batch_plan = MicroBatchPlan(batch_size=16, min_batch_size=2)
    counts = iter([5, 6, 6, 7, 8, 9, 10, 11])
    memory = MemoryConfig(sample_interval_ms=0)
    settings = RobustConfig(device="cpu", memory=memory, shrink_before_oom=shrinks)
    run.memory_keeper = AttemptMemory(run, settings, read_alloc_retries=lambda: next(counts))
    sizes, model = [], nn.Linear(1, 1)
    for step in range(1, 9):
        run.backward(lambda part: model(part).mean(), torch.zeros(16, 1), model)
        sizes.append(run.micro_batcher.size)
        run.progress(step)
    warned = [event for event in reported if isinstance(event, MemoryTight)]
    assert [(event.step, event.alloc_retries) for event in warned] == [(5, 8)], "once an attempt"
    assert sum("nearly out" in message for message in caplog.messages) == 1
    # two more such steps before the size after that
    assert sizes == ([16] * 5 + [8] * 2 + [4] if shrinks else [16] * 8)


def test_the_samples_of_an_attempt_are_assessed_at_its_end(tmp_path: Path, caplog):
    caplog.set_level("INFO", "robust_train")
    assert attempt_stability(tmp_path, 1) is None
    samples = [Sample(n, 1 + n // 500, "cpu", n, resident=n % 500 * MIB) for n in range(1000)]
    samples[500:] = [replace(sample, resident=MIB) for sample in samples[500:]]
    (tmp_path / FILE_NAME).write_text("".join(encode(sample) + "\n" for sample in samples))
    growing, stable = attempt_stability(tmp_path, 1), attempt_stability(tmp_path, 2)
    assert growing is not None
    assert growing.mib_per_100_steps == 100
    assert stable is not None
    assert stable.kind == "stable"
    [warning] = caplog.records
    assert warning.levelname == "WARNING"
    assert "attempt 1: memory is growing (leak suspected: +100.0" in warning.getMessage()


def test_a_killed_attempt_is_judged_by_what_it_had_sampled(own_trainers: World):
    ended = run(
        own_trainers, "dies_at_once", *ON_CPU, "max_retries=0", "memory.sample_interval_ms=10"
    )
    assert ended.returncode == 1, ended.output
    assert ended.attempts[0]["memory_returned"] is None
    assert ended.attempts[0]["memory_stability"]["kind"] == "unknown"


@pytest.mark.slow
def test_the_frames_of_a_failed_trainer_are_left_to_a_debugger_that_asks_for_them(own_trainers):
    for setting, reasons in (("true", ["failure"]), ("false", [])):
        ended = run(
            own_trainers,
            "has_a_plain_bug",
            *ON_CPU,
            "isolation=none",
            f"memory.clear_on_failure={setting}",
            f"hydra.job.name={setting}",
        )
        last = [e for e in ended.journal if e["event"] == "job_started"][-1]["time"]
        cleared = [e for e in events(ended, "memory_cleared") if e["time"] > last]
        assert [event["reason"] for event in cleared] == reasons
