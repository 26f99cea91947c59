"""Describes how an attempt's process ended.

The launcher creates the :class:`Exit` once the attempt's last process has ended, and adds it to the
attempt's record.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from robust_train.model.failure import Failure


@dataclass(frozen=True)
class Exit:
    """How an attempt's process ended, as the launcher saw it."""

    # As in `subprocess`. None if the attempt ran in the launcher's process.
    returncode: int | None = None
    pid: int | None = None
    max_resident_bytes: int = 0  # peak of host memory
    output: str = field(default="", repr=False)  # the last lines that it printed
    # The last lack of memory in a script's log, which may be above those lines.
    shortage: str = field(default="", repr=False)
    # The stacks of its threads when it crashed or was ended.
    stacks: str = field(default="", repr=False)
    failure: Failure | None = None  # why the launcher ended it, None if the launcher did not
    was_stopped: bool = False  # whether the launcher had asked it to stop
    was_hurried: bool = False  # whether a second signal killed it at once
    oom_killed: bool | None = None  # whether the kernel's OOM killer ended it; None if unknown
    # The trainer's exception, for an attempt in the launcher's process.
    error: BaseException | None = field(default=None, compare=False)
