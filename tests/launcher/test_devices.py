"""Which device a job gets, on simulated machines: the real NVML client on a simulated library."""

import json
import sys

import pytest

from two_gpu_machine import A, B
from world import wait_until

TOO_MUCH = "min_gpu_memory_mb=22000"


def warnings_of(ended, words):
    return [line for line in ended.stdout.splitlines() if words in line]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("mask", "arguments", "visible"),
    [
        (None, [], A),  # the one with the most free memory
        (None, ["device=cpu"], ""),
        (None, ["device=cuda:1"], B),
        (None, ["device=GPU-bbbb", "auto_device=false"], B),
        (None, ["device=cuda:1", "auto_device=true"], A),
        (None, ["device=1"], B),
        (None, ["device=[1]"], B),
        (None, ["device=0,1"], A),  # of these the one with the most free memory
        ("GPU-bbbb", ["device=[0,GPU-bbbb]"], B),
        # a mask is never widened
        ("1", [], B),
        ("1", ["auto_device=false", "device=cuda:0"], B),
        ("GPU-cccc", [], ""),
    ],
)
def test_device_alone_is_enough_without_automatic_choice(world, mask, arguments, visible):
    if mask is not None:
        world.environ["CUDA_VISIBLE_DEVICES"] = mask
    ended = world.train("what_it_was_given", *arguments, code=0)
    given, (attempt,) = ended.summary["result"], ended.attempts
    assert given["visible"] == visible
    assert given["device"] == ("cuda:0" if visible else "cpu")
    assert attempt["gpu_uuid"] == (visible or None)
    if mask == "GPU-cccc":
        assert "CUDA_VISIBLE_DEVICES=GPU-cccc" in warnings_of(ended, " warning: ")[0]


def test_requests_for_gpus_are_refused_without_any(world):
    """A request for one is refused and a request for two is not dropped."""
    world.environ["CUDA_VISIBLE_DEVICES"] = ""
    ended = world.train("what_it_was_given", "device=cuda", code=2)
    assert "device=cuda: no such GPU here" in ended.stderr
    ended = world.train("what_it_was_given", "num_gpus=2", code=0)
    (said,) = warnings_of(ended, "num_gpus=2")
    assert "on the CPU in one process" in said


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trainer._target_=trainers.plain", "device=cuda:7"], ["device=cuda:7", A, B]),
        (["trainer._target_=trainers.plain", "device=[0,7]"], ["device=cuda:7", A, B]),
        (["trainer._target_=no_such_module.train", TOO_MUCH], ["no_such_module"]),
    ],
)
def test_waiting_that_cannot_help_is_refused_at_once(world, arguments, words):
    world.run(*arguments, "gpu_check_interval_seconds=1000").was_refused(words)


def test_working_cuda_without_gpus_ends_at_once(world, two_gpus):
    """The message has both ways out."""
    two_gpus.cuda = 12020
    two_gpus.update(0)
    ended = world.train("computes_on_its_device", code=2)
    (message,) = ended.stderr.strip().splitlines()
    assert message.startswith("CUDA cannot work here: ")
    for words in ("the driver supports CUDA 12.2", "this torch was built", "device=cpu"):
        assert words in message
    assert [(a["outcome"], a["action"]) for a in ended.attempts] == [("setup", "give_up")]
    world.train("computes_on_its_device", "device=cpu", code=0)


@pytest.mark.usefixtures("two_gpus")
def test_a_silent_cpu_fallback_is_warned_about(world):
    """The program takes the CPU because CUDA does not start."""
    words = "CUDA initialization: The NVIDIA driver on your system is too old (found 12020)."
    code = f"import time, warnings; warnings.warn('{words}'); time.sleep(1.2)"
    argv = json.dumps([sys.executable, "-c", code])
    ended = world.run("trainer=command", f"trainer.argv={argv}", code=0)
    (said,) = warnings_of(ended, "may train on the CPU")
    assert "cuda:0: The NVIDIA driver on your system is too old" in said


def test_a_job_halves_then_switches_gpu_then_cpu(world, two_gpus):
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
    actions = [(a["outcome"], a["action"]) for a in ended.attempts]
    remedies = ["halve_batch", "switch_gpu", "cpu_fallback"]
    assert actions == [("device_oom", remedy) for remedy in remedies] + [("completed", "none")]
    assert {a["effective_batch_size"] for a in ended.attempts} == {64}
    recorded = [[a["gpu_uuid"] or "cpu", str(a["batch_size"])] for a in ended.attempts]
    given = [line.split()[:2] for line in attempts.read_text().splitlines()]
    assert given == recorded == [[A, "64"], [A, "32"], [B, "32"], ["cpu", "64"]]
    assert "23000 MiB free" in ended.attempts[1]["reason"]


@pytest.mark.usefixtures("two_gpus")
def test_timeouts_lead_to_the_cpu_or_75(world):
    """The CPU if it is allowed, otherwise exit code 75."""
    soon = ("gpu_wait_timeout_minutes=0.01", "gpu_check_interval_seconds=0.1")
    ended = world.train("what_it_was_given", TOO_MUCH, *soon)
    assert ended.summary["result"]["visible"] == ""
    assert " warning: no GPU" in ended.output
    never = ("allow_cpu_fallback=false", "wait_for_gpu=false")
    ended = world.train("what_it_was_given", TOO_MUCH, *never, code=75)
    assert (ended.summary["status"], ended.attempts) == ("no_device", [])
    assert "22000" in ended.stderr


@pytest.mark.usefixtures("two_gpus")
def test_importing_cuda_early_shows_the_attempts_gpu(world):
    ended = world.run("trainer._target_=libraries.starts_cuda.train", code=0)
    assert ended.summary["result"] == A
    # an interpreter in which a library has done so runs no attempt
    of_a_library = "trainer._target_=starts_cuda.train"
    preloads = "trainer.preload_modules=[starts_cuda]"
    ended = world.with_libraries().run(of_a_library, preloads, code=0)
    assert ended.summary["result"] == A
