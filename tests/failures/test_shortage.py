"""oneDNN's message for exhausted memory has other causes too: the room that is left decides.

The limits are real (RLIMIT_DATA); only oneDNN's message is raised on purpose.
"""

import contextlib
import json
import resource
import sys
from dataclasses import replace

import psutil
import pytest
import torch

import warm
from command_world import CommandWorld
from noted import Noted
from robust_train import MicroBatcher, OOMHandler, classify_failure, launch
from robust_train.failures.shortage import with_shortage
from robust_train.model.attempt import Attempt
from robust_train.model.exit import Exit
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import AttemptSpec

MIB = 1024**2


@pytest.fixture(autouse=True)
def onednn():
    yield
    torch.backends.mkldnn.set_flags(True)


@contextlib.contextmanager
def room_of(bytes_left):
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + bytes_left
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class Fails(torch.nn.Linear):
    """Raises what oneDNN does above ``most`` samples, after ``first`` if that is an error."""

    def __init__(self, most, first=None):
        super().__init__(4, 1)
        self.most, self.first = most, first
        self.sizes = Noted()

    def forward(self, x):
        self.sizes.append(len(x))
        if self.first is not None:
            error, self.first = self.first, None
            raise error
        if len(x) > self.most:
            raise RuntimeError("could not create a primitive")
        return super().forward(x)


def step(model):
    MicroBatcher().backward(lambda part: model(part).mean(), torch.ones(16, 4), model)


CHECKED = (8, 4, 2, 2, 1, 3)
"""Passes that check the split into parts of 8: one that does not fit, one with its halves."""


def kind_of(message):
    return classify_failure(RuntimeError(message)).kind.value


@pytest.mark.parametrize(
    "message",
    [
        "could not create a primitive",
        "could not create a primitive descriptor for the matmul primitive. Run workload with "
        "environment variable ONEDNN_VERBOSE=all to get additional diagnostic information.",
        "could not execute a primitive",
        "could not create a memory object",
        "could not execute sdpa backward primitive on cpu",
    ],
)
def test_free_memory_decides_what_the_message_means(message):
    """It is a lack of host memory with little room, and a bug with much."""
    assert kind_of(message) == "bug"
    with room_of(8 * MIB):
        assert kind_of(message) == "host_oom"
        assert kind_of("could not create a memory descriptor from blob") == "bug"
        error = RuntimeError(message)
        first = classify_failure(error)
    assert "of host memory left" in first.message
    assert classify_failure(error) == first, "also when memory is free again"


def handled(model):
    OOMHandler(16, 1).run(lambda batch_size: model(torch.ones(batch_size, 4)))


@pytest.mark.parametrize(
    ("run", "most", "first", "room", "sizes"),
    [
        (step, 4, None, 32 * MIB, [16, *CHECKED, 8, 4, 4, 4, 4]),
        # memory has run out in the step just before
        (step, 4, MemoryError("no memory"), None, [16, *CHECKED, 8, 4, 4, 4, 4]),
        # no size helps: it is raised with its own traceback
        (step, 0, None, 32 * MIB, [16, 8, 4, 2, 8, 4, 2, 1]),
        (handled, 0, None, 32 * MIB, [16, 8, 4, 2, 1]),
        # without a limit it is raised at once
        (step, 4, None, None, [16]),
    ],
)
def test_steps_are_split_while_memory_is_short(run, most, first, room, sizes):
    model, helps = Fails(most, first), sizes[-1] == most
    with contextlib.ExitStack() as limits:
        raised = None if helps else limits.enter_context(pytest.raises(RuntimeError, match="prim"))
        if room is not None:
            limits.enter_context(room_of(room))
        run(model)
    assert model.sizes == sizes
    assert helps or raised.traceback[-1].name == "forward"


def launched(folder, model, seen):
    """Run the model on a job's batch in this process, and note each attempt's size and kernels."""

    def train(cfg):
        seen.append((cfg.training.batch_size, torch.backends.mkldnn.enabled))
        model(torch.ones(cfg.training.batch_size, 4))

    training = {"batch_size": 8, "num_workers": 0}
    cfg = {"isolation": "none", "device": "cpu", "auto_device": False, "training": training}
    with room_of(64 * MIB):
        launch(train, cfg, run_dir=folder)


def test_a_job_beyond_help_ends_as_a_bug(tmp_path):
    """No size helps. Each attempt does without oneDNN. In one process, where its compiler would
    find no memory again.
    """
    seen = []
    with pytest.raises(RuntimeError, match="primitive"):
        launched(tmp_path, Fails(most=0), seen)
    assert seen == [(8, True), (4, False)]
    attempts = json.loads((tmp_path / "summary.json").read_text())["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["host_oom", "bug"]


COMPILER_WITHOUT_MEMORY = """
import resource
import psutil, torch
from robust_train import MicroBatcher

torch.set_num_threads(1)
model = torch.nn.Conv2d(3, 16, 3)
torch.nn.functional.conv2d(torch.zeros(1, 5, 8, 8), torch.zeros(4, 5, 3, 3))
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
sizes = []
fill = []

def loss_of(part):
    sizes.append(len(part))
    if len(part) == 8:
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data, hard))
        try:
            while True:
                fill.append(bytearray(100_000))
        except MemoryError:
            del fill[-2:]  # with nothing at all left, oneDNN dies of SIGSEGV
    try:
        return model(part).mean()
    finally:
        fill.clear()
        if len(sizes) == 2:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

MicroBatcher().backward(loss_of, torch.ones(8, 3, 8, 8), model)
print(sizes, torch.backends.mkldnn.enabled)
"""


def test_a_step_survives_onednns_memory_error():
    """For the rest of the thread oneDNN's compiler finds none, even without a limit."""
    ended = warm.preloaded(COMPILER_WITHOUT_MEMORY)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[0] == "[8, 4, 4] False", ended.stderr


def bug(message, **exit_):
    failure = Failure(FailureKind.BUG, f"ended with exit code 1: RuntimeError: {message}")
    return Attempt(2, AttemptSpec((), 8, 1), exit=Exit(returncode=1, **exit_), failure=failure)


def test_attempts_end_by_host_memory_in_two_cases():
    """At its limit, or after an attempt that ran out."""
    message = "could not create a primitive"
    ran_out = replace(bug(""), failure=Failure(FailureKind.HOST_OOM, "MemoryError"))
    assert with_shortage(bug(message), []) == bug(message)
    assert with_shortage(bug("no such file"), [ran_out]) == bug("no such file")
    after = with_shortage(bug(message), [ran_out])
    assert after.kind is FailureKind.HOST_OOM
    assert "an earlier attempt ran out of host memory" in str(after.message)
    with room_of(256 * MIB):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        full = with_shortage(bug(message, max_resident_bytes=limit * 3 // 4), [])
        half = with_shortage(bug(message, max_resident_bytes=limit // 2), [])
    assert (full.kind, half.kind) == (FailureKind.HOST_OOM, FailureKind.BUG)
    assert "(ulimit -d)" in str(full.message)


SCRIPT_OF_TWO_ERRORS = """
import sys
size = int(sys.argv[1])
if size > 8:
    bytearray(1 << 60)
if size > 4:
    raise RuntimeError("could not create a primitive")
"""


def test_a_script_halves_again_after_memory_errors(world):
    (world.folder / "train.py").write_text(SCRIPT_OF_TWO_ERRORS)
    program = (sys.executable, "train.py", "{batch_size}")
    ended = CommandWorld(world).run("--batch-size", "16", "--", *program).with_code(0)
    outcomes = [attempt["outcome"] for attempt in ended.summary["attempts"]]
    assert outcomes == ["host_oom", "host_oom", "completed"]
