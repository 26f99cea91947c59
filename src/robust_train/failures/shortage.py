"""Finds out whether a lack of host memory explains an error whose message does not say so.

oneDNN reports a failed allocation as an unsupported call, and an import that runs out of memory may
end with any error. `describe_shortage` and `do_without_onednn` run in the attempt that failed. The
launcher calls `with_shortage` after each attempt. Both processes call `explain_failed_import`.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from robust_train.failures.patterns import UNCLEAR
from robust_train.host.memory import read_available_bytes, read_own_memory, read_process_limits
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.readable import GIB, memory

log = logging.getLogger("robust_train")

# Host memory is short if less than this share of the process's peak is left.
_LITTLE = 0.5
_LEAST_FOR_TORCH = 2 * GIB
"""If the limit is at most this large, a process that died during an import ran out of memory."""

# Messages of the dynamic loader, of the C library, and of Python for a thread without a stack.
_NO_MEMORY = re.compile(
    r"failed to map segment from shared object|Cannot allocate memory|can't start new thread"
)


def explain_failed_import(module: str, error: BaseException | None) -> str | None:
    """Return a message if a limit of this process leaves no memory to import a module, otherwise
    None.

    Args:
        module: the module whose import failed.
        error: its exception, or None if the import ended the process.
    """
    limits = read_process_limits()
    if not limits:
        return None
    most, _, command = min(limits)
    if error is None:
        is_explained = most <= _LEAST_FOR_TORCH
    else:
        is_explained = isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
    if not is_explained:
        return None
    package = module.partition(".")[0]
    if package == "robust_train":
        package = "torch"  # torch is by far the largest package that robust-train imports.
    return (
        f"the limit of {memory(most)} ({command}) leaves no room to import {package}; "
        f"set a higher limit: {command} unlimited"
    )


def do_without_onednn(failure: Failure) -> None:
    """Turn oneDNN off in this process after oneDNN ran out of memory.

    oneDNN's compiler (Xbyak) remembers the first failed allocation of a thread, so every later
    primitive fails too, however much memory is free. torch's own kernels take its place.
    """
    torch = sys.modules.get("torch")
    if failure.evidence.clue != Clue.UNCLEAR or torch is None:
        return
    if torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(False)
        log.warning("oneDNN is off until this process ends: convolutions take up to twice the time")


def with_shortage(attempt: Attempt, earlier: Sequence[Attempt]) -> Attempt:
    """Return the attempt with an ambiguous oneDNN error classified as a lack of host memory, if the
    process came near its limit or an earlier attempt ran out of host memory. Otherwise return it
    unchanged."""
    failure = attempt.failure
    if failure is None or failure.kind is not FailureKind.BUG:
        return attempt
    if not UNCLEAR.words.search(failure.message):
        return attempt
    peak = attempt.exit.max_resident_bytes
    most, _, command = min(read_process_limits(), default=(0, "", ""))
    if most and peak * (1 + _LITTLE) > most:
        why = f"{memory(peak)} used of {memory(most)} ({command})"
    elif any(before.kind is FailureKind.HOST_OOM for before in earlier):
        why = "an earlier attempt ran out of host memory"
    else:
        return attempt
    failure = replace(
        failure,
        kind=FailureKind.HOST_OOM,
        message=f"{failure.message} ({why})",
        evidence=Evidence(library="onednn", clue=Clue.UNCLEAR),
    )
    return replace(attempt, failure=failure)


def describe_shortage() -> str:
    """Return the evidence that this process is short of host memory, empty if it is not."""
    try:
        own_status = read_own_memory()
        room = read_available_bytes()
    except MemoryError:
        return "no host memory left"
    except OSError as error:
        return "no host memory left" if error.errno == errno.ENOMEM else ""
    # The peak of resident memory, without mapped files.
    used = own_status.get("VmHWM", 0) - own_status.get("RssFile", 0)
    if room > _LITTLE * used:
        return ""
    return f"{memory(room)} of host memory left, {memory(used)} used"
