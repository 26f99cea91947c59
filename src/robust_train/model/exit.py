"""How an attempt's process ended. The launcher fills it in after the last process is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from robust_train.model.failure import Failure


@dataclass(frozen=True)
class Exit:
    """How an attempt's process ended, as the launcher saw it."""

    # Negative for a signal; None if the launcher itself ran it.
    returncode: int | None = None
    pid: int | None = None
    max_resident_bytes: int = 0  # peak of host memory
    output: str = field(default="", repr=False)  # the end of the output
    # The last lack of memory in a script's log, which may stand above that end.
    shortage: str = field(default="", repr=False)
    # The stacks of its threads when it crashed or was ended.
    stacks: str = field(default="", repr=False)
    failure: Failure | None = None  # why the launcher ended it, None if it did not
    was_stopped: bool = False  # whether the launcher had asked it to stop
    was_hurried: bool = False  # whether a second signal killed it at once
    # whether the kernel killed it for lack of memory; None if unknown
    oom_killed: bool | None = None
    # The trainer's exception, for an attempt in the launcher's process.
    error: BaseException | None = field(default=None, compare=False)
