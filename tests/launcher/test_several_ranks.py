"""One job in several processes, on the CPU over gloo: the real launcher, agent and collectives."""

import os
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from forked_ranks import of_forks
from robust_train.attempt import rank
from robust_train.folder.state import read_state
from robust_train.report.facts import speed_of
from simulated_nvml import Gpu

ON_THE_CPU = ("auto_device=false", "device=cpu")


def ranks(number, trainer, *more):
    target = f"trainer._target_=rank_trainers.{trainer}"
    return target, f"num_gpus={number}", *ON_THE_CPU, *more


@pytest.mark.proves("functions (`run.backward`)", "several GPUs", "in the step")
@pytest.mark.proves("functions (`run.backward`)", "several GPUs", "new attempt")
def test_a_memory_error_on_one_rank_concerns_both(world):
    """It splits the step of both, or both end after saving."""
    # freed blocks go back at once, so that what is held is what counts against a limit
    world.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    ended = world.run(*ranks(2, "splits_in_its_own_loop", "training.batch_size=32"), code=0)
    first, second = ended.attempts
    assert (first["ranks"], first["effective_batch_size"]) == (2, 64)
    result = ended.summary["result"]
    assert result["short_of_memory"] == pytest.approx(result["at_ease"], abs=1e-6)
    changes = [e for e in ended.journal if e["event"] == "micro_batch_changed"]
    assert {change["rank"] for change in changes} == {1}, "told by the rank that ran out"
    assert result["size"] in {change["after"] for change in changes}, "and taken over by the first"
    assert changes[0]["kind"] == "host_oom"
    assert "[rank 1]" in ended.output
    # and then it could not continue: the other one has heard of that, and saved
    assert (first["outcome"], first["action"]) == ("host_oom", "retry")
    assert "(rank 1)" in first["reason"]
    assert result["heard"].startswith("rank 1: ")
    assert second["outcome"] == "completed"
    assert second["ranks"] == 2


def test_each_ranks_training_time_is_known(world):
    """How long it trains before the others wait."""
    ended = world.run(*ranks(2, "is_slow_on_rank_1", "training.batch_size=4"), code=0)
    first, second = ended.attempts[0]["speed"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert (first["steps"], second["steps"]) == (7, 7)
    for speed in (first, second):
        assert speed["seconds_per_step"] >= 0.099, "they wait for each other"
    assert second["seconds_alone_per_step"] >= 0.099
    # what slows both down, such as a busy machine, changes nothing
    assert first["seconds_alone_per_step"] < second["seconds_alone_per_step"] - 0.05
    state = read_state(world.run_dir)
    assert [asdict(speed) for speed in speed_of(state.attempt)] == [first, second]
    assert "speed: " in ended.output


def test_a_bug_on_one_rank_ends_all(world):
    """The group ends with its traceback and is not retried."""
    started = time.monotonic()
    ended = world.run(*ranks(3, "has_a_bug_on_rank_1"), code=1)
    (attempt,) = ended.attempts
    assert (attempt["outcome"], attempt["action"]) == ("bug", "give_up")
    assert "(rank 1)" in ended.summary["reason"]
    assert "KeyError: 'a key that is not there'" in ended.stderr
    frames = [line for line in ended.stderr.splitlines() if line.strip().startswith("File ")]
    assert frames
    assert all("rank_trainers.py" in frame for frame in frames), "nothing of the agent is shown"
    assert time.monotonic() - started < 300, "the others never end by themselves"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "batch_size", "waits", "ranks", "sizes"),
    [
        pytest.param((), 24, 0.0, 3, (16, 2), id="three"),
        # somebody else has the fifth, and three do not divide 64
        pytest.param((Gpu(free_mib=100),), 16, 3.0, 2, (16, 2), id="two-after-waiting"),
    ],
)
def test_a_group_continues_with_fewer_gpus(
    world, cuda_machine_with, others, batch_size, waits, ranks, sizes
):
    """The effective batch stays the same."""
    world.with_environ(cuda_machine_with(Gpu(), Gpu(), Gpu(), Gpu(), *others).environ)
    keys = ("num_gpus=4", f"training.batch_size={batch_size}", "training.num_workers=0")
    patience = ("min_batch_size=4", "min_num_gpus=2", "gpu_wait_timeout_minutes=0.05")
    target = "trainer._target_=rank_trainers.loses_a_gpu_of_four"
    ended = world.run(target, *keys, *patience, code=0)
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("device_fault", "fewer_gpus")
    assert "(rank 2)" in first["reason"] or "cuda:2" in first["reason"]
    assert (first["ranks"], second["ranks"]) == (4, ranks)
    assert (second["batch_size"], second["gradient_accumulation_steps"]) == sizes
    assert first["effective_batch_size"] == second["effective_batch_size"] == 4 * batch_size
    assert first["device"].split(",")[2] not in second["device"].split(",")
    assert ended.summary["result"] == {"ranks": ranks, "start": 2, "visible": ranks}
    ended_at, *_ = (e["time"] for e in ended.journal if e["event"] == "attempt_ended")
    _, began_at = (e["time"] for e in ended.journal if e["event"] == "attempt_started")
    assert began_at - ended_at >= waits


def test_early_imported_libraries_know_their_rank():
    """The library was imported before there was a rank."""
    utilities = pytest.importorskip("lightning.pytorch.utilities")
    request = SimpleNamespace(of_first_rank=(), ranks=2)

    def rank_of_lightning(number):
        rank.set_environment(number, request, 29500)
        return utilities.rank_zero_only.rank

    assert utilities.rank_zero_only.rank == 0
    assert of_forks(2, rank_of_lightning) == [0, 1]


def test_each_rank_has_its_gpu_and_cores(monkeypatch):
    """The ranks divide the cores among them."""

    def set_up(count):
        os.environ.pop("OMP_NUM_THREADS", None)
        actions = []
        monkeypatch.setattr(rank, "when_cuda_starts", lambda torch, action: actions.append(action))
        monkeypatch.setattr(torch.cuda, "set_device", actions.append)
        spec = SimpleNamespace(gpus=("GPU-a",))
        request = SimpleNamespace(spec=spec, ranks=count)
        rank.set_up_torch(count - 1, request)
        actions[0]()
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], actions[1]

    cores = len(os.sched_getaffinity(0))
    (alone,) = of_forks(1, lambda _: set_up(1))
    (shared,) = of_forks(1, lambda _: set_up(2 * cores))
    assert alone == [cores, str(cores), 0]
    assert shared == [1, "1", 2 * cores - 1]
