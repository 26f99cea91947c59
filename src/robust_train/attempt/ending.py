"""Describes the exception that ended an attempt, for the launcher.

The runner calls `describe_end` in the process that trains.
"""

from __future__ import annotations

import base64
import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from robust_train.failures import classify_failure
from robust_train.folder.checkpoint_writing import CheckpointError
from robust_train.model.errors import (
    ConfigError,
    RankFailure,
    TrainingDiverged,
    TrainingStopped,
    UserError,
)
from robust_train.model.events import Failed
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind

# A larger exception is not sent. The launcher then raises the failure without the exception.
_LARGEST_ERROR_BYTES = 20_000
# Example: "Unsupported interpolation type my_resolver"
_NO_RESOLVER = re.compile(r"Unsupported interpolation type (\w[\w.]*)")
# A traceback begins with frames of these modules, which call the trainer.
_OUR_MODULES = ("robust_train.attempt.runner", "robust_train.attempt.loading")


def describe_end(error: BaseException, with_evidence: Callable[[Failure], Failure]) -> Failed:
    """Return the event for an attempt that ended with ``error``.

    Args:
        error: the exception that the trainer raised.
        with_evidence: adds the features' findings to the failure.
    """
    config_error = str(error) if isinstance(error, ConfigError) else ""
    has_clear_message = isinstance(error, (TrainingDiverged, UserError))
    caused_by_rank = None
    if isinstance(error, RankFailure) and error.is_elsewhere:
        caused_by_rank = error.rank
    classes = type(error).__mro__
    return Failed(
        with_evidence(_failure_of(error)),
        config_error=config_error,
        traceback="" if has_clear_message else _trainer_traceback(error),
        error=_pickle_error(error),
        others_know=isinstance(error, RankFailure),
        caused_by_rank=caused_by_rank,
        exceptions=tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in classes),
    )


def _failure_of(error: BaseException) -> Failure:
    if isinstance(error, (TrainingStopped, KeyboardInterrupt)):
        return Failure(FailureKind.INTERRUPTED, str(error) or "interrupted")
    if isinstance(error, SystemExit):
        return Failure(
            FailureKind.BUG,
            f"the trainer called sys.exit({error.code!r})",
            Evidence(clue=Clue.UNKNOWN if error.code else None),
        )
    if isinstance(error, TrainingDiverged):
        return error.failure
    if isinstance(error, (ConfigError, UserError)):
        evidence = Evidence(clue=Clue.USER_ERROR)
        return Failure(FailureKind.BUG, str(error), evidence)
    failure = classify_failure(error)
    if isinstance(error, CheckpointError) and error.bytes:
        # The launcher waits until the disk has room for this size.
        evidence = replace(failure.evidence, requested_bytes=error.bytes)
        failure = replace(failure, evidence=evidence)
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        failure = replace(failure, message=_describe_missing_key(error))
    return failure


def _describe_missing_key(error: ConfigKeyError | ConfigAttributeError) -> str:
    """Return one line about a key that the trainer reads but its config lacks."""
    frames = traceback.extract_tb(_without_omegaconf(error.__traceback__))
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, reads"
    key = error.full_key
    return f"{place} {key}, which the config lacks; give it with +{key}=VALUE"


def _trainer_traceback(error: BaseException) -> str:
    """Return the traceback without the frames that call the trainer."""
    frames = error.__traceback__
    while frames is not None and _module_of(frames) in _OUR_MODULES:
        frames = frames.tb_next
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        frames = _without_omegaconf(frames)
    return "".join(traceback.format_exception(type(error), error, frames))


def _without_omegaconf(frames: TracebackType | None) -> TracebackType | None:
    """Cut off OmegaConf's frames, because the mistake is in the line that reads the key."""
    frame = frames
    while frame is not None:
        inner = frame.tb_next
        if inner is not None and "omegaconf" in _module_of(inner).split("."):
            frame.tb_next = None
        frame = frame.tb_next
    return frames


def _module_of(frames: TracebackType) -> str:
    return str(frames.tb_frame.f_globals.get("__name__", ""))


def _pickle_error(error: BaseException) -> str:
    """Return the pickled exception as text, empty if it cannot be pickled or is too large."""
    try:
        data = pickle.dumps(error)
        # Many exceptions can be pickled but not unpickled.
        pickle.loads(data)
    except Exception:
        return ""
    if len(data) >= _LARGEST_ERROR_BYTES:
        return ""
    return base64.b64encode(data).decode()


def find_missing_resolver(raised: BaseException) -> UserError | None:
    """Return an error with one line about a resolver that this process lacks, or None if the
    exception has another cause.

    The traceback does not show why: the script registered the resolver in the launcher only.
    """
    error: BaseException | None = raised
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        match = _NO_RESOLVER.search(str(error))
        if isinstance(error, OmegaConfBaseException) and match is not None:
            key = f"{error.full_key}: " if error.full_key else ""
            return UserError(
                f"{key}the attempt has no resolver {match[1]!r}: it is a separate process, which "
                "imports the script; register the resolver next to the imports, not under "
                'if __name__ == "__main__":'
            )
        error = error.__cause__ or error.__context__
    return None
