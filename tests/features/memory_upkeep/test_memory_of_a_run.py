"""What a run does about its memory, says of it, and leaves when it runs out."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memory_limit import limited_growth
from robust_train.attempt.run import Run, live_of
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.training_plans import MicroBatchPlan
from robust_train.features.memory_upkeep import attempt as memory_upkeep
from robust_train.features.memory_upkeep.attempt import CacheChecks, MemoryUpkeep, Reserve
from robust_train.folder.memory_samples import FILE_NAME
from robust_train.model.errors import RankFailure
from robust_train.model.events import MemoryCleared, MemoryReported, MemoryTight, OutOfMemory
from robust_train.model.failure import Failure, FailureKind
from robust_train.readable import MIB
from taking_part import hooked, trained

IN_ANY_PROCESS = pytest.mark.parametrize(
    "isolation", ["process", pytest.param("none", marks=pytest.mark.slow)]
)


def events(ended, name):
    return [event for event in ended.journal if event["event"] == name]


def written_down(ended):
    return json.loads((ended.run_dir / "oom-attempt-1.json").read_text())


@IN_ANY_PROCESS
def test_memory_at_milestones_is_in_log_and_journal(own_trainers, isolation):
    """Milestones are epochs and the final clean-up, among others."""
    ended = own_trainers.run(
        "ends_epochs",
        f"isolation={isolation}",
        "device=cpu",
        "memory.fraction=0.5",
        "memory.samples=false",
        code=0,
    )
    [cleared] = events(ended, "memory_cleared")
    assert (cleared["reason"], cleared["of"], cleared["attempt"]) == ("end", "resident", 1)
    returned = ended.attempts[0]["memory_returned"]
    assert returned == {key: cleared[key] for key in returned}
    assert returned["returned_bytes"] == max(returned["before_bytes"] - returned["after_bytes"], 0)
    assert returned["seconds"] > 0
    epochs = [(e["epoch"], e["step"], e["metrics"]["val_loss"]) for e in events(ended, "epoch")]
    assert epochs == [(1, 3, 0.5), (2, 6, 0.25)]
    assert ended.output.count("memory.fraction=0.5: has no effect on the CPU") == 1
    assert not (ended.run_dir / FILE_NAME).exists()
    assert ended.attempts[0]["memory_stability"] is None


@IN_ANY_PROCESS
def test_what_fills_the_memory_is_recorded_in_time(own_trainers, isolation):
    """The failed functions still hold it then."""
    ended = own_trainers.run(
        "runs_out_in_a_function",
        f"isolation={isolation}",
        "min_batch_size=64",
        "training.num_workers=0",
        code=1,
    )
    report = written_down(ended)
    largest = report["tensors"][:3]
    assert [t["bytes"] / MIB for t in largest] == [20, 16, 12]
    assert [t["shape"] for t in largest] == [[5 * MIB], [4 * MIB], [3 * MIB]]
    assert {(t["dtype"], t["device"]) for t in largest} == {("float32", "cpu")}
    assert (report["attempt"], report["step"], report["kind"]) == (1, 7, "host_oom")
    [event] = events(ended, "out_of_memory")
    assert (event["tensors"], event["snapshot"]) == ("oom-attempt-1.json", None)
    assert (event["attempt"], event["step"]) == (1, 7)
    assert [event["milestone"] for event in events(ended, "memory")] == ["out of memory"]
    named = "out of memory: the largest tensors are 20.0 MiB float32 (5242880,) on cpu"
    assert named in ended.output
    assert "memory.fraction" not in ended.output
    # the failure is the trainer's own
    assert "can't allocate memory" in ended.attempts[0]["message"]
    # a process that ends anyway returns its memory by that
    reasons = [event["reason"] for event in events(ended, "memory_cleared")]
    assert reasons == (["failure"] if isolation == "none" else [])


@pytest.mark.parametrize("time", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(9))])
def test_completely_full_memory_leaves_room_to_record_it(own_trainers, time):
    ended = own_trainers.run(
        "fills_the_memory_to_the_last_byte", "min_batch_size=64", "memory.samples=false", code=1
    )
    assert ended.attempts[0]["outcome"] == "host_oom"
    assert len(events(ended, "out_of_memory")) == 1
    assert written_down(ended)["kind"] == "host_oom"


def test_without_room_there_is_no_reserve():
    reserve = Reserve()
    with limited_growth(MIB):
        reserve.hold()
    reserve.release()


# --- in this process ---


def looked_after(folder, **memory):
    """A run with its memory's keeper, and what it reports."""
    reported = []
    run = Run(run_dir=folder, report=reported.append)
    live_of(run).parts.split_by(MicroBatchPlan(batch_size=16, min_batch_size=2))
    config = checked(complete({"device": "cpu", "memory": memory}))
    hooked(run, MemoryUpkeep, config)
    return run, reported


OF_ANOTHER = Failure(FailureKind.HOST_OOM, "out of memory")


def of_type(reported, kind):
    return [event for event in reported if isinstance(event, kind)]


@pytest.mark.parametrize(
    ("error", "memory", "files", "cleared"),
    [
        (MemoryError(), {}, ["oom-attempt-1.json"], ["failure"]),
        (MemoryError(), {"snapshot_on_oom": False}, [], ["failure"]),
        (KeyError("no matter of memory"), {}, [], ["failure"]),
        (RankFailure(1, OF_ANOTHER, is_elsewhere=True), {}, [], ["failure"]),
        (KeyError("for a debugger"), {"clear_after": ("save", "epoch")}, [], []),
    ],
)
def test_bugs_and_disabled_records_write_no_memory_record(tmp_path, error, memory, files, cleared):
    run, reported = looked_after(tmp_path, **memory)
    with pytest.raises(type(error)), trained(run):
        raise error
    live_of(run).hooks.close(error)
    assert [path.name for path in tmp_path.glob("oom-*")] == files
    assert len(of_type(reported, OutOfMemory)) == len(files)
    told = [event.milestone for event in of_type(reported, MemoryReported)]
    assert told == ["out of memory"] * isinstance(error, MemoryError)
    assert [event.reason for event in of_type(reported, MemoryCleared)] == cleared


def test_running_out_in_steps_is_recorded_once(tmp_path):
    """There is one record for each attempt."""
    run, reported = looked_after(tmp_path)
    model = nn.Linear(1, 1)

    def loss_of(part):
        if len(part) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return model(part).mean()

    with trained(run):
        for step in (1, 2):
            run.backward(loss_of, torch.zeros(16, 1), model)
            assert run.micro_batcher.size == 4, f"step {step}"
            # the next step is tried whole again
            live_of(run).parts.split_by(live_of(run).parts.plan)
            run.progress(step)
    assert len(of_type(reported, OutOfMemory)) == 1
    assert json.loads((tmp_path / "oom-attempt-1.json").read_text())["tensors"]


def test_a_failed_memory_record_costs_only_a_warning(tmp_path, caplog):
    """The error of the trainer is not hidden."""
    caplog.set_level("INFO", "robust_train")
    (tmp_path / "oom-attempt-1.json").mkdir()  # a folder where the file should be
    run, reported = looked_after(tmp_path)
    error = MemoryError("the trainer's own")
    held = torch.empty(MIB)
    with pytest.raises(MemoryError) as raised, trained(run):
        raise error
    assert raised.value is error
    [event] = of_type(reported, OutOfMemory)
    assert (event.kind, event.tensors) == (FailureKind.HOST_OOM, None)
    warned, *told = caplog.messages
    assert warned.startswith(f"cannot write {tmp_path}/oom-attempt-1.json: ")
    assert f"float32 ({held.numel()},)" in told[0], "the log has the largest nevertheless"
    assert "all in" not in told[0]


def test_an_allocator_that_always_clears_is_warned_about(tmp_path, caplog, monkeypatch):
    """It empties its cache step after step."""
    counts = iter([5, 6, 6, 7, 8, 9, 10, 11])
    monkeypatch.setattr(memory_upkeep, "alloc_retries", lambda index: next(counts))
    run, reported = looked_after(tmp_path)
    sizes, model = [], nn.Linear(1, 1)
    for step in range(1, 9):
        run.backward(lambda part: model(part).mean(), torch.zeros(16, 1), model)
        sizes.append(run.micro_batcher.size)
        run.progress(step)
    warned = [(event.step, event.alloc_retries) for event in of_type(reported, MemoryTight)]
    assert warned == [(5, 8)], "once an attempt"
    assert sum("nearly full" in message for message in caplog.messages) == 1
    assert sizes == [16] * 8


# --- when the CUDA cache is emptied during training ---


def emptied(steps, frequency, threshold, *, comes_back):
    """Steps at which a run empties its cache whose tensors hold 2 GiB and whose steps need 8 more,
    once, or time and again."""
    checks, unused_share, done = CacheChecks(frequency, threshold), 0.8, []
    for step in range(1, steps + 1):
        if checks.should_empty(lambda share=unused_share: share):
            done.append(step)
            unused_share = 0.8 if comes_back else 0.0
    return done


@given(st.integers(1, 200), st.floats(0, 1))
def test_memory_soon_taken_again_is_returned_less_often(frequency, threshold):
    is_enough = threshold <= 0.8
    once = emptied(2000, frequency, threshold, comes_back=False)
    assert once == [frequency] * is_enough
    often = emptied(100_000, frequency, threshold, comes_back=True)
    assert len(often) <= 18 * is_enough
    assert often[: len(once)] == once


def test_a_useful_check_makes_checks_frequent_again():
    """Clearings that were useless have made them rare; then a check finds little in use."""
    checks = CacheChecks(10, 0.5)
    shares = {10: 0.8, 30: 0.8, 70: 0.8, 150: 0.1, 160: 0.8}
    seen = []
    for number in range(1, 161):
        checks.should_empty(lambda number=number: seen.append(number) or shares[number])
    assert seen == list(shares)
