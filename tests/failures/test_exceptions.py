"""Failures that really happen here, and how exceptions hang together."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import multiprocessing.synchronize
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from robust_train.failures import classify_exit, classify_failure
from robust_train.failures.advice import advice_for
from robust_train.model.failure import Clue, FailureKind

OOM = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 11.76 GiB of "
    "which 13.44 MiB is free. Of the allocated memory 11.36 GiB is allocated by PyTorch, and "
    "76.92 MiB is reserved by PyTorch but unallocated."
)

REAL = {
    "host_oom": [
        "torch_allocation",
        "torch_backward",
        "torch_more_than_the_address_space",
        "numpy_allocation",
        "python_allocation",
        "mapping_without_memory",
        "allocation_in_worker",
        "torch_allocation_in_worker",
        "numpy_allocation_in_worker",
    ],
    "worker_death": [
        "worker_is_killed",
        "worker_segfaults",
        "worker_has_a_bus_error",
        "worker_aborts",
        "worker_leaves",
    ],
    "setup": ["cuda_is_absent", "backend_is_not_built"],
    "comm": ["peer_answers_too_late", "peer_is_gone", "peers_do_not_come", "store_is_not_there"],
    "bug": [
        "key_error_in_worker",
        "index_error_in_worker",
        "file_missing_in_worker",
        "shapes_differ",
        "wrong_view",
        "label_out_of_range",
        "size_overflows",
        "torn_checkpoint",
    ],
}


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """What really failed, in a process of its own, and what was said of it."""
    names = [name for named in REAL.values() for name in named]
    script = Path(__file__).with_name("real_failures.py")
    run = subprocess.run(
        [sys.executable, str(script), *names], capture_output=True, text=True, timeout=120
    )
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(told) == len(names), run.stderr[-3000:]
    return {one["name"]: one for one in told}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in REAL.items() for name in names]
)
def test_says_what_really_failed(kind: str, name: str, real: dict[str, Any]) -> None:
    if name == "cuda_is_absent":
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")

    assert real[name]["kind"] == kind, real[name]


def test_reads_the_size_that_torch_and_numpy_could_not_have(real: dict[str, Any]) -> None:
    gib = 1024**3

    assert real["torch_allocation"]["requested_bytes"] == gib
    assert real["numpy_allocation"]["requested_bytes"] == gib
    assert real["torch_allocation"]["library"] == "torch"
    assert real["numpy_allocation"]["library"] == "numpy"


def test_torchs_own_class_is_a_device_oom_with_and_without_words() -> None:
    import torch

    assert classify_failure(torch.OutOfMemoryError(OOM)).kind is FailureKind.DEVICE_OOM
    assert classify_failure(torch.OutOfMemoryError()).kind is FailureKind.DEVICE_OOM
    assert classify_failure(torch.OutOfMemoryError("no words", 7)).kind is FailureKind.DEVICE_OOM


def test_errno_12_is_the_hosts_memory_whatever_the_locale_says() -> None:
    error = OSError(12, "Nicht genügend Hauptspeicher verfügbar", "/data/tokens.bin")

    assert classify_failure(error).kind is FailureKind.HOST_OOM


def test_a_full_disk_is_not_a_full_shared_memory() -> None:
    disk = OSError(28, "No space left on device", "/scratch/checkpoint.pt")
    shared = OSError(28, "No space left on device", "/dev/shm/torch_12_3")

    assert classify_failure(disk).kind is FailureKind.DISK_FULL
    assert classify_failure(shared).kind is FailureKind.WORKER_DEATH


def caught(raising: Any) -> BaseException:
    try:
        raising()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def in_handler(first: Exception, second: Exception, cause: object = "context") -> BaseException:
    """What is raised while another error is handled: implicitly, or ``from`` a cause."""

    def raising() -> None:
        try:
            raise first
        except Exception as error:
            if cause == "context":
                raise second  # noqa: B904
            raise second from (error if cause == "error" else None)

    return caught(raising)


@pytest.mark.parametrize(
    ("first", "second", "cause", "kind"),
    [
        (RuntimeError(OOM), RuntimeError("training failed"), "context", "device_oom"),
        (RuntimeError(OOM), RuntimeError("training failed"), "error", "device_oom"),
        (RuntimeError(OOM), RuntimeError("the data set is empty"), None, "bug"),
        (
            RuntimeError(OOM),
            ValueError("batch_size is too large for this GPU"),
            "error",
            "device_oom",
        ),
        (KeyError("label"), RuntimeError(OOM), "context", "device_oom"),
        # torch.save ends a file that lacks what could not be written
        (MemoryError(), RuntimeError("unexpected pos 576 vs 534"), "context", "host_oom"),
        # a mistake made while handling it is a bug of its own
        (RuntimeError(OOM), KeyError("oom"), "context", "bug"),
        (RuntimeError(OOM), TypeError("no"), "context", "bug"),
        (RuntimeError(OOM), NameError("oom"), "context", "bug"),
        (RuntimeError(OOM), AttributeError("no such thing"), "context", "bug"),
    ],
)
def test_looks_through_what_led_to_an_error(
    first: Exception, second: Exception, cause: object, kind: str
) -> None:
    failure = classify_failure(in_handler(first, second, cause))
    assert failure.kind.value == kind
    assert failure.evidence.requested_bytes == (20 * 1024**2 if kind == "device_oom" else None)


def test_an_exception_that_is_its_own_cause_ends() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first

    assert classify_failure(first).kind is FailureKind.BUG


def test_a_message_that_cannot_be_printed_is_a_bug() -> None:
    class Unprintable(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no")

    assert classify_failure(Unprintable(OOM)).kind is FailureKind.BUG


def test_a_message_of_several_arguments_is_read() -> None:
    assert classify_failure(RuntimeError("step 3", OOM)).kind is FailureKind.DEVICE_OOM


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
class TestExceptionGroups:
    def test_looks_into_groups_of_groups(self) -> None:
        inner = ExceptionGroup("ranks", [RuntimeError(OOM)])  # noqa: F821
        group = ExceptionGroup("nodes", [ValueError("aborted"), inner])  # noqa: F821

        assert classify_failure(group).kind is FailureKind.DEVICE_OOM

    def test_of_several_failures_the_cause_is_told_not_its_echo(self) -> None:
        group = ExceptionGroup(  # noqa: F821
            "ranks",
            [
                RuntimeError("[pair.cc:598] Connection closed by peer [127.0.0.1]:5141"),
                RuntimeError("CUDA error: uncorrectable ECC error encountered"),
            ],
        )

        assert classify_failure(group).kind is FailureKind.DEVICE_FAULT

    def test_a_group_of_bugs_is_a_bug(self) -> None:
        group = ExceptionGroup("both", [KeyError("CUDA out of memory"), TypeError("no")])  # noqa: F821

        assert classify_failure(group).kind is FailureKind.BUG


@pytest.mark.parametrize("code", [143, 130, 138])
def test_leaving_with_a_signals_code_is_an_interruption(code: int) -> None:
    assert classify_failure(SystemExit(code)).kind is FailureKind.INTERRUPTED


@pytest.mark.parametrize("code", [1, 2, "no data", None])
def test_leaving_with_any_other_code_is_a_bug(code: object) -> None:
    assert classify_failure(SystemExit(code)).kind is FailureKind.BUG


# --- what only the stack tells ---


def test_memory_that_ran_out_in_an_import_is_no_matter_of_the_batch() -> None:
    def lazily() -> None:
        from failures import modules_that_fail

        assert modules_that_fail

    failure = classify_failure(caught(lazily))
    log = traceback.format_exception(caught(lazily))
    outer = '  File "train.py", line 1, in <module>\n'
    exit_failure = classify_exit(1, log[0] + outer + "".join(log[1:]))

    for found in (failure, exit_failure):
        assert found.kind is FailureKind.HOST_OOM
        assert found.evidence.clue == Clue.IMPORT
    assert classify_failure(caught(lambda: [0] * 10**15)).evidence.clue is None


def test_memory_that_ran_out_while_a_model_was_moved_is_no_matter_of_the_batch() -> None:
    import torch

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, batch: Any) -> Any:
            raise torch.OutOfMemoryError(OOM)

        def move(self) -> None:
            def run_out(tensor: Any) -> Any:
                raise torch.OutOfMemoryError(OOM)

            self._apply(run_out)

    model = Large()
    assert classify_failure(caught(model.move)).evidence.clue == Clue.MODEL
    assert classify_failure(caught(lambda: model(None))).evidence.clue is None


def test_a_time_out_is_the_networks_only_where_the_networks_code_raised_it() -> None:
    def own() -> None:
        raise TimeoutError("the epoch took too long")

    def of_a_server() -> None:
        import urllib.request

        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with silent:
            urllib.request.urlopen(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)

    def of_a_future() -> None:
        concurrent.futures.Future[int]().result(timeout=0.01)

    assert classify_failure(caught(own)).kind is FailureKind.BUG
    assert classify_failure(caught(of_a_future)).kind is FailureKind.BUG
    assert classify_failure(caught(of_a_server)).kind is FailureKind.COMM
    bare = type("TimeoutError", (TimeoutError,), {"__module__": "aiohttp.client"})
    code = compile("def get(): raise error()", "/x/site-packages/aiohttp/client.py", "exec")
    scope: dict[str, Any] = {"error": bare}
    exec(code, scope)
    assert classify_failure(caught(scope["get"])).kind is FailureKind.COMM


def test_descriptors_that_data_loaders_exhaust_mean_fewer_workers() -> None:
    def raised_in(path: str) -> BaseException:
        scope: dict[str, Any] = {}
        exec(compile("def run(): raise OSError(24, 'Too many open files')", path, "exec"), scope)
        return caught(scope["run"])

    loader = raised_in("/lib/python3.11/multiprocessing/reduction.py")
    assert classify_failure(loader).kind is FailureKind.WORKER_DEATH
    assert classify_failure(raised_in("/home/me/train.py")).kind is FailureKind.BUG


def test_a_worker_killed_while_it_hands_over_a_batch_is_no_matter_of_the_network() -> None:
    path = "/lib/python3.11/multiprocessing/connection.py"
    scope: dict[str, Any] = {}
    exec(
        compile("def run(): raise ConnectionResetError(104, 'reset by peer')", path, "exec"), scope
    )
    failure = classify_failure(caught(scope["run"]))
    assert (failure.kind, failure.evidence.clue) == (FailureKind.WORKER_DEATH, Clue.KILLED)
    of_a_server = classify_failure(ConnectionResetError(104, "reset by peer"))
    assert of_a_server.kind is FailureKind.COMM


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.ENOSYS, errno.EACCES])
def test_a_lock_for_workers_that_finds_no_shared_memory_is_the_workers_matter(monkeypatch, number):
    """As in a container without /dev/shm; torch's loader makes such queues."""

    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        multiprocessing.Queue()
    failure = classify_failure(raised.value)
    assert failure.kind is FailureKind.WORKER_DEATH
    assert "shared memory" in " ".join(advice_for(failure.kind, failure.evidence))
    assert classify_failure(OSError(number, "a file of the trainer's")).kind is FailureKind.BUG
