"""Whether this process had little host memory left when an error was raised."""

from __future__ import annotations

import contextlib

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


def _little_is_left() -> str:
    from robust_train.memory.host import own_memory, room_left
    from robust_train.readable import memory

    try:
        own, room = own_memory(), room_left()
    except OSError:
        return ""
    # the peak without the files that are mapped
    used = own.get("VmHWM", 0) - own.get("RssFile", 0)
    if room is None or room > _LITTLE * used:
        return ""
    return f"{memory(room)} of host memory left, {memory(used)} used"
