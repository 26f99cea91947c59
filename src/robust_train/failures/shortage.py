"""Whether a lack of host memory explains an error whose message does not say so.

`little_is_left` and `do_without_onednn` run in the process that failed. The launcher calls
`with_shortage` after each attempt. Both call `no_room_to_import` for an import that failed.
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
"""Up to this limit, a process that dies during an import counts as out of memory."""

# Messages of the dynamic loader, of the C library, and of Python for a thread without a stack.
_NO_ROOM = re.compile(
    r"failed to map segment from shared object|Cannot allocate memory|can't start new thread"
)


def no_room_to_import(module: str, error: BaseException | None) -> str | None:
    """Return a line if a limit of this process leaves no room to import a module, otherwise None.

    Args:
        module: the module whose import failed.
        error: its exception, or None if the import ended the process.
    """
    limits = read_process_limits()
    if not limits:
        return None
    most, _, command = min(limits)
    if error is None and most > _LEAST_FOR_TORCH:
        return None
    is_in_words = error is not None and not isinstance(error, MemoryError)
    if is_in_words and not _NO_ROOM.search(str(error)):
        return None
    top = module.partition(".")[0]
    return (
        f"the limit of {memory(most)} ({command}) leaves no room to import "
        f"{'torch' if top == 'robust_train' else top}; set a higher one: {command} unlimited"
    )


def do_without_onednn(failure: Failure) -> None:
    """Turn oneDNN off in this process after it ran out of memory. Its compiler (Xbyak) remembers
    the first failed allocation in the thread, so every later primitive fails too, however much
    memory there is. torch's own kernels take its place."""
    torch = sys.modules.get("torch")
    if failure.evidence.clue != Clue.UNCLEAR or torch is None:
        return
    if torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(False)
        log.warning("oneDNN is off until this process ends: convolutions take up to twice the time")


def with_shortage(attempt: Attempt, earlier: Sequence[Attempt]) -> Attempt:
    """Return the attempt. An ambiguous oneDNN message becomes a lack of host memory if the process
    came near its limit, or if an earlier attempt ran out."""
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
        why = "an attempt before it ran out of host memory"
    else:
        return attempt
    failure = replace(
        failure,
        kind=FailureKind.HOST_OOM,
        message=f"{failure.message} ({why})",
        evidence=Evidence(library="onednn", clue=Clue.UNCLEAR),
    )
    return replace(attempt, failure=failure)


def little_is_left() -> str:
    """Return the evidence that host memory is short, empty if there is none."""
    try:
        own_status = read_own_memory()
        room = read_available_bytes()
    except MemoryError:
        return "no host memory left"
    except OSError as error:
        return "no host memory left" if error.errno == errno.ENOMEM else ""
    # The peak without mapped files.
    used = own_status.get("VmHWM", 0) - own_status.get("RssFile", 0)
    if room > _LITTLE * used:
        return ""
    return f"{memory(room)} of host memory left, {memory(used)} used"
