"""Failures that really happen here, and how exceptions hang together."""

import concurrent.futures
import errno
import json
import multiprocessing.synchronize
import os
import socket
import subprocess
import sys
import traceback
import urllib.request
from pathlib import Path

import pytest
import torch

from failures.real_failures import SCENARIOS
from robust_train.failures import classify_exit, classify_failure
from robust_train.failures.advice import advice_for
from robust_train.model.failure import Clue, FailureKind

OOM = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 11.76 GiB of "
    "which 13.44 MiB is free. Of the allocated memory 11.36 GiB is allocated by PyTorch, and "
    "76.92 MiB is reserved by PyTorch but unallocated."
)

REAL = [(kind, name) for kind, named in SCENARIOS.items() for name in named]


@pytest.fixture(scope="module")
def real():
    """What really failed, in a process of its own, and what was said of it."""
    names = [name for _, name in REAL]
    script = Path(__file__).with_name("real_failures.py")
    run = subprocess.run(
        [sys.executable, str(script), *names], capture_output=True, text=True, timeout=120
    )
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(told) == len(names), run.stderr[-3000:]
    return {answer["name"]: answer for answer in told}


@pytest.mark.parametrize(("kind", "name"), REAL)
def test_says_what_really_failed(kind, name, real):
    if name == "cuda_is_absent" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert real[name]["kind"] == kind, real[name]


def test_torchs_and_numpys_requested_size_is_read(real):
    """It is the size that they could not have."""
    for library in ("torch", "numpy"):
        told = real[f"{library}_allocation"]
        assert (told["requested_bytes"], told["library"]) == (1024**3, library)


def caught(raising):
    try:
        raising()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def in_handler(first, second, cause="context"):
    """What is raised while another error is handled: implicitly, or ``from`` a cause."""

    def raising():
        try:
            raise first
        except BaseException as error:
            if cause == "context":
                raise second  # noqa: B904
            raise second from (error if cause == "error" else None)

    return caught(raising)


TORN = "unexpected pos 576 vs 534"


@pytest.mark.parametrize(
    ("first", "second", "cause", "kind"),
    [
        (RuntimeError(OOM), RuntimeError("training failed"), "context", "device_oom"),
        (RuntimeError(OOM), RuntimeError("training failed"), "error", "device_oom"),
        (RuntimeError(OOM), RuntimeError("the data set is empty"), None, "bug"),
        (RuntimeError(OOM), ValueError("too large for this GPU"), "error", "device_oom"),
        (KeyError("label"), RuntimeError(OOM), "context", "device_oom"),
        # torch.save ends a file that lacks what could not be written
        (MemoryError(), RuntimeError(TORN), "context", "host_oom"),
        (KeyboardInterrupt(), RuntimeError(TORN), "context", "interrupted"),
        (ConnectionResetError(104, "reset by peer"), RuntimeError(TORN), "context", "comm"),
        # a mistake made while handling it is a bug of its own
        (RuntimeError(OOM), KeyError("oom"), "context", "bug"),
        (RuntimeError(OOM), TypeError("no"), "context", "bug"),
        (RuntimeError(OOM), NameError("oom"), "context", "bug"),
        (RuntimeError(OOM), AttributeError("no such thing"), "context", "bug"),
    ],
)
def test_looks_through_what_led_to_an_error(first, second, cause, kind):
    failure = classify_failure(in_handler(first, second, cause))
    assert failure.kind.value == kind
    assert failure.evidence.requested_bytes == (20 * 1024**2 if kind == "device_oom" else None)


class Unprintable(RuntimeError):
    def __str__(self):
        raise ValueError("no")


def its_own_cause():
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    return first


ERRORS = {
    "torch's own class": (torch.OutOfMemoryError(OOM), "device_oom"),
    "torch's own class without words": (torch.OutOfMemoryError(), "device_oom"),
    "torch's own class with other words": (torch.OutOfMemoryError("no words", 7), "device_oom"),
    "several arguments": (RuntimeError("step 3", OOM), "device_oom"),
    "errno 12 in any language": (OSError(12, "Nicht genügend Hauptspeicher", "/data"), "host_oom"),
    "a full disk": (OSError(28, "No space left on device", "/scratch/a.pt"), "disk_full"),
    "full shared memory": (OSError(28, "No space left on device", "/dev/shm/a"), "worker_death"),
    "its own cause": (its_own_cause(), "bug"),
    "a message that cannot be printed": (Unprintable(OOM), "bug"),
    **{f"a signal's code {code}": (SystemExit(code), "interrupted") for code in (143, 130, 138)},
    **{f"another code {code}": (SystemExit(code), "bug") for code in (1, 2, "no data", None)},
}
if sys.version_info >= (3, 11):
    inner = ExceptionGroup("ranks", [RuntimeError(OOM)])  # noqa: F821
    of_ranks = [
        RuntimeError("[pair.cc:598] Connection closed by peer [127.0.0.1]:5141"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    ]
    for name, kind, parts in (
        ("a group in a group", "device_oom", [ValueError("aborted"), inner]),
        ("a cause and its echo", "device_fault", of_ranks),
        ("a group of bugs", "bug", [KeyError("CUDA out of memory"), TypeError("no")]),
    ):
        ERRORS[name] = (ExceptionGroup(name, parts), kind)  # noqa: F821


@pytest.mark.parametrize(("error", "kind"), ERRORS.values(), ids=ERRORS)
def test_exceptions_are_known_by_many_signs(error, kind):
    """By class, number, code or what they hold."""
    assert classify_failure(error).kind.value == kind


# --- what only the stack tells ---


def test_memory_errors_in_imports_blame_no_batch():
    def lazily():
        from failures import modules_that_fail

        assert modules_that_fail

    failure = classify_failure(caught(lazily))
    log = traceback.format_exception(caught(lazily))
    outer = '  File "train.py", line 1, in <module>\n'
    exit_failure = classify_exit(1, log[0] + outer + "".join(log[1:]))

    for classified in (failure, exit_failure):
        assert classified.kind is FailureKind.HOST_OOM
        assert classified.evidence.clue == Clue.IMPORT
    assert classify_failure(caught(lambda: [0] * 10**15)).evidence.clue is None


def test_memory_errors_while_moving_models_blame_no_batch():
    def run_out(tensor):
        raise torch.OutOfMemoryError(OOM)

    class Large(torch.nn.Linear):
        def forward(self, batch):
            run_out(batch)

    model = Large(1, 1)
    moved = caught(lambda: model._apply(run_out))
    assert classify_failure(moved).evidence.clue == Clue.MODEL
    assert classify_failure(caught(lambda: model(None))).evidence.clue is None


def raised_in(path, error):
    """The error as code in this file raises it."""
    scope = {"error": error}
    exec(compile("def run(): raise error", path, "exec"), scope)
    return caught(scope["run"])


def test_only_network_code_has_network_timeouts():
    """If the code of the network raised it."""

    def of_a_server():
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            urllib.request.urlopen(address, timeout=0.05)

    def of_a_future():
        concurrent.futures.Future().result(timeout=0.01)

    timeout = raised_in("/home/me/train.py", TimeoutError("the epoch took too long"))
    assert classify_failure(timeout).kind is FailureKind.BUG
    assert classify_failure(caught(of_a_future)).kind is FailureKind.BUG
    assert classify_failure(caught(of_a_server)).kind is FailureKind.COMM
    bare = type("TimeoutError", (TimeoutError,), {"__module__": "aiohttp.client"})
    of_a_library = raised_in("/x/site-packages/aiohttp/client.py", bare())
    assert classify_failure(of_a_library).kind is FailureKind.COMM


def test_errors_in_data_loaders_are_blamed_on_workers():
    """If the code of a data loader raises them."""
    descriptors = OSError(24, "Too many open files")
    loader = raised_in("/lib/python3.11/multiprocessing/reduction.py", descriptors)
    assert classify_failure(loader).kind is FailureKind.WORKER_DEATH
    too_many_files = raised_in("/home/me/train.py", OSError(24, "Too many open files"))
    assert classify_failure(too_many_files).kind is FailureKind.BUG
    assert classify_failure(ConnectionResetError(104, "reset by peer")).kind is FailureKind.COMM
    reset = ConnectionResetError(104, "reset by peer")
    handed_over = raised_in("/lib/python3.11/multiprocessing/connection.py", reset)
    failure = classify_failure(handed_over)
    assert (failure.kind, failure.evidence.clue) == (FailureKind.WORKER_DEATH, Clue.KILLED)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.ENOSYS, errno.EACCES])
def test_a_worker_lock_without_shared_memory_concerns_workers(monkeypatch, number):
    """For example in a container without /dev/shm; torch's loader makes such queues."""

    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        multiprocessing.Queue()
    failure = classify_failure(raised.value)
    assert failure.kind is FailureKind.WORKER_DEATH
    assert "shared memory" in " ".join(advice_for(failure.kind, failure.evidence))
    assert classify_failure(OSError(number, "a file of the trainer's")).kind is FailureKind.BUG
