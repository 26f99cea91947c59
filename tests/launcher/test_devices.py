"""Which device a job gets, on simulated machines: the real NVML client on a simulated library."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from simulated_nvml import GPU_IS_LOST, Machine
from two_gpu_machine import A, B
from world import World, wait_until


def visible_to_trainer(world: World, *arguments: str) -> str:
    ended = world.train("what_it_was_given", *arguments, code=0)
    return ended.summary["result"]["visible"]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("arguments", "visible"),
    [
        ([], A),  # the one with the most free memory
        (["device=cpu"], ""),
        (["device=cuda:1"], B),
        (["device=GPU-bbbb", "auto_device=false"], B),
        (["device=cuda:1", "auto_device=true"], A),
    ],
)
def test_a_device_alone_is_enough_unless_the_choice_is_asked_for(world, arguments, visible):
    ended = world.train("what_it_was_given", *arguments, code=0)
    given, (attempt,) = ended.summary["result"], ended.attempts
    assert given["visible"] == visible
    assert given["device"] == ("cuda:0" if visible else "cpu")
    assert attempt["gpu_uuid"] == (visible or None)


def test_without_a_gpu_a_request_for_one_is_refused_and_for_two_is_not_dropped(world: World):
    world.environ["CUDA_VISIBLE_DEVICES"] = ""
    ended = world.train("what_it_was_given", "device=cuda", code=2)
    assert "device=cuda: no such GPU here" in ended.stderr
    ended = world.train("what_it_was_given", "num_gpus=2", code=0)
    said = [line for line in ended.stdout.splitlines() if "num_gpus=2" in line]
    assert len(said) == 1
    assert "on the CPU in one process" in said[0]


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_is_not_there_is_refused_with_those_that_are(world: World):
    ended = world.train("what_it_was_given", "auto_device=false", "device=cuda:7", code=2)
    assert "device=cuda:7" in ended.stderr
    assert A in ended.stderr
    assert B in ended.stderr


def test_a_cuda_that_works_with_no_gpu_ends_the_job_at_once_with_both_ways_on(world, two_gpus):
    two_gpus.cuda = 12020
    two_gpus.update(0)
    ended = world.run("trainer._target_=trainers.computes_on_its_device", code=2)
    (message,) = ended.stderr.strip().splitlines()
    assert message.startswith("CUDA cannot work here: ")
    for words in ("the driver supports CUDA 12.2", "this torch was built", "device=cpu"):
        assert words in message
    assert [(a["outcome"], a["action"]) for a in ended.attempts] == [("setup", "give_up")]
    ended = world.run("trainer._target_=trainers.computes_on_its_device", "device=cpu", code=0)


@pytest.mark.usefixtures("two_gpus")
def test_a_program_that_takes_the_cpu_because_cuda_does_not_start_does_so_with_a_warning(world):
    words = "CUDA initialization: The NVIDIA driver on your system is too old (found 12020)."
    code = f"import time, warnings; warnings.warn('{words}'); time.sleep(1.2)"
    argv = json.dumps([sys.executable, "-c", code])
    ended = world.run("trainer=command", f"trainer.argv={argv}", code=0)
    said = [line for line in ended.stdout.splitlines() if "may train on the CPU" in line]
    assert len(said) == 1
    assert "cuda:0: The NVIDIA driver on your system is too old" in said[0]


@pytest.mark.usefixtures("two_gpus")
def test_a_mask_is_never_widened(world: World):
    world.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert visible_to_trainer(world) == B
    assert visible_to_trainer(world, "auto_device=false", "device=cuda:0") == B


@pytest.mark.usefixtures("two_gpus")
def test_gpus_hidden_by_mistake_mean_a_warning_that_names_the_variable(world: World):
    world.environ["CUDA_VISIBLE_DEVICES"] = "GPU-cccc"
    ended = world.train("what_it_was_given")
    assert ended.summary["result"]["device"] == "cpu"
    warning = next(line for line in ended.stdout.splitlines() if " warning: " in line)
    assert "CUDA_VISIBLE_DEVICES" in warning
    assert "GPU-cccc" in warning


def test_halves_takes_the_other_gpu_and_in_the_end_the_cpu(world: World, two_gpus: Machine):
    attempts = world.folder / "attempts"
    go = world.folder / "go"
    world.environ |= {
        "BATCH_BUDGETS": json.dumps({A: 8, B: 4}),
        "ATTEMPTS_FILE": str(attempts),
        "GO_FILE": str(go),
    }
    process = world.start(
        "trainer._target_=trainers.within_a_budget", "training.batch_size=64", "min_batch_size=32"
    )
    wait_until(attempts.exists, "the first attempt")
    two_gpus.update(1, free_mib=23000)  # somebody else's job ended on the other GPU
    go.touch()
    ended = world.end(process, code=0)
    rows = [(a["gpu_uuid"], a["batch_size"], a["action"]) for a in ended.attempts]
    assert rows == [
        (A, 64, "halve_batch"),
        (A, 32, "switch_gpu"),
        (B, 32, "cpu_fallback"),
        (None, 64, "none"),
    ]
    assert {a["effective_batch_size"] for a in ended.attempts} == {64}
    outcomes = [a["outcome"] for a in ended.attempts]
    assert outcomes == ["device_oom"] * 3 + ["completed"]
    lines = [line.split()[:2] for line in attempts.read_text().splitlines()]
    assert lines == [[A, "64"], [A, "32"], [B, "32"], ["cpu", "64"]]
    assert "23000 MiB free" in ended.attempts[1]["reason"]


def test_waits_until_enough_memory_is_free(world: World, two_gpus: Machine):
    process = world.start(
        "trainer._target_=trainers.what_it_was_given",
        "min_gpu_memory_mb=22000",
        "gpu_check_interval_seconds=0.1",
    )
    wait_until(
        lambda: len(two_gpus.calls("nvmlDeviceGetMemoryInfo_v2")) >= 12, "it looks repeatedly"
    )
    two_gpus.update(1, free_mib=23000)
    ended = world.end(process, code=0)
    assert ended.summary["result"]["visible"] == B
    assert ended.summary["wait_seconds"] > 0
    assert "22000" in ended.output


@pytest.mark.usefixtures("two_gpus")
def test_when_time_is_up_the_cpu_is_taken_or_the_exit_code_is_75(world: World):
    too_much = "min_gpu_memory_mb=22000"
    in_time = ("gpu_wait_timeout_minutes=0.01", "gpu_check_interval_seconds=0.1")
    ended = world.train("what_it_was_given", too_much, *in_time)
    assert ended.summary["result"]["visible"] == ""
    assert " warning: no GPU" in ended.output
    never = ("allow_cpu_fallback=false", "wait_for_gpu=false")
    ended = world.train("what_it_was_given", too_much, *never, code=75)
    assert ended.summary["status"] == "no_device"
    assert ended.attempts == []
    assert "22000" in ended.stderr


@pytest.mark.usefixtures("two_gpus")
def test_a_request_that_no_gpu_could_ever_meet_fails_at_once(world: World):
    ended = world.train("what_it_was_given", "min_gpu_memory_mb=90000", code=2)
    assert "24000" in ended.stderr, "the largest request that could be met is named"
    ended = world.train("what_it_was_given", "num_gpus=3", code=2)
    assert "only 2 GPUs" in ended.stderr


@pytest.mark.usefixtures("two_gpus")
def test_a_signal_ends_the_waiting_at_once(world: World):
    process = world.start(
        "trainer._target_=trainers.what_it_was_given",
        "min_gpu_memory_mb=22000",
        "gpu_check_interval_seconds=1000",
    )
    journal = world.run_dir / "journal.jsonl"
    wait_until(journal.exists, "the job has started")
    process.send_signal(signal.SIGINT)
    ended = world.end(process, code=130)
    assert ended.summary["status"] == "interrupted"
    assert ended.attempts == []
    assert "Traceback" not in ended.output


@pytest.mark.usefixtures("two_gpus")
def test_a_trainer_that_cannot_be_imported_ends_the_waiting(world: World):
    ended = world.run(
        "trainer._target_=no_such_module.train",
        "min_gpu_memory_mb=22000",
        "gpu_check_interval_seconds=1000",
    )
    assert ended.returncode == 2, ended.output
    assert "no_such_module" in ended.stderr


def test_a_lost_gpu_is_skipped_with_its_reason(world: World, two_gpus: Machine):
    two_gpus.fail("nvmlDeviceGetMemoryInfo", GPU_IS_LOST, 0)
    two_gpus.fail("nvmlDeviceGetMemoryInfo_v2", GPU_IS_LOST, 0)
    ended = world.train("what_it_was_given")
    assert ended.summary["result"]["visible"] == B
    assert "lost" in ended.output.lower()


@pytest.mark.usefixtures("two_gpus")
def test_a_module_that_starts_cuda_at_import_sees_the_attempts_gpu(world: World):
    ended = world.run("trainer._target_=trainer_that_starts_cuda.train", code=0)
    assert ended.summary["result"] == A


@pytest.mark.usefixtures("two_gpus")
def test_an_interpreter_in_which_a_library_has_started_cuda_runs_no_attempt(world: World):
    ended = world.with_libraries().run(
        "trainer._target_=trainer_with_cuda_library.train", "trainer.preload_modules=[starts_cuda]"
    )
    assert ended.returncode == 0, ended.output
    assert ended.summary["result"] == A
