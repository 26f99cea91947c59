"""Whether this process had little host memory left when an error was raised."""

from __future__ import annotations

import contextlib
import logging
import sys

from robust_train.values import Clue, Failure

log = logging.getLogger("robust_train")

_LITTLE = 0.5
"""Share of what the process used at its peak that is little to be left."""

_SAID = "_robust_train_shortage"


def shortage_at(exception: BaseException, *, ran_out_before: bool) -> str:
    """Return what shows that memory was short, empty for no evidence.

    The first answer for an exception stays: later the memory of its frames may be free again.
    """
    known = getattr(exception, _SAID, None)
    if isinstance(known, str):
        return known
    found = "host memory had run out just before" if ran_out_before else _little_is_left()
    with contextlib.suppress(Exception):
        setattr(exception, _SAID, found)
    return found


def do_without_onednn(failure: Failure) -> None:
    """Turn oneDNN off in this process after a failure of its own for lack of memory.

    Its compiler (Xbyak) keeps the first failed allocation for the rest of the thread: every later
    primitive fails too, however much memory there is. torch's own kernels take its place.
    """
    torch = sys.modules.get("torch")
    if failure.evidence.clue != Clue.UNCLEAR or torch is None:
        return
    if torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(False)
        log.warning("oneDNN is off until this process ends: convolutions take up to twice the time")


def _little_is_left() -> str:
    from robust_train.memory.host import own_memory, room_left
    from robust_train.readable import memory

    try:
        own, room = own_memory(), room_left()
    except OSError:
        return ""
    # the peak without the files that are mapped
    used = own.get("VmHWM", 0) - own.get("RssFile", 0)
    if room > _LITTLE * used:
        return ""
    return f"{memory(room)} of host memory left, {memory(used)} used"
