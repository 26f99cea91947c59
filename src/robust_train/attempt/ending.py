"""How an attempt reports the exception that ended it. The runner calls it in the attempt's
process."""

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
from robust_train.folder.checkpoints import CheckpointError
from robust_train.model.errors import (
    ConfigError,
    RankFailure,
    TrainingDiverged,
    TrainingStopped,
    UserError,
)
from robust_train.model.events import Failed
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind

_LARGEST_ERROR_BYTES = 20_000
_NO_RESOLVER = re.compile(r"Unsupported interpolation type (\w[\w.]*)")
# The frames of these modules come before the trainer's frames, and are not its mistake.
_OURS = ("robust_train.attempt.runner", "robust_train.attempt.loading")


def failed(error: BaseException, with_evidence: Callable[[Failure], Failure]) -> Failed:
    """Return the event of an attempt that ``error`` ended.

    Args:
        error: the exception that the trainer raised.
        with_evidence: adds the features' findings to the failure.
    """
    of_rank = error if isinstance(error, RankFailure) else None
    is_in_words = isinstance(error, (TrainingDiverged, UserError))
    classes = type(error).__mro__
    return Failed(
        with_evidence(_failure_of(error)),
        config_error=str(error) if isinstance(error, ConfigError) else "",
        traceback="" if is_in_words else _trainer_traceback(error),
        error=_pickled(error),
        others_know=of_rank is not None,
        caused_by_rank=of_rank.rank if of_rank and of_rank.is_elsewhere else None,
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
        # From this size the launcher knows when the disk has room for it.
        evidence = replace(failure.evidence, requested_bytes=error.bytes)
        failure = replace(failure, evidence=evidence)
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        failure = replace(failure, message=_missing_key(error))
    return failure


def _missing_key(error: ConfigKeyError | ConfigAttributeError) -> str:
    """Return one line about a key that the trainer reads and that its config lacks."""
    frames = traceback.extract_tb(_without_omegaconf(error.__traceback__))
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, reads"
    key = error.full_key
    return f"{place} {key}, which the config lacks; give it with +{key}=VALUE"


def _trainer_traceback(error: BaseException) -> str:
    """Return the traceback as the trainer's author sees it: without this package's frames."""
    frames = error.__traceback__
    while frames is not None and _module(frames) in _OURS:
        frames = frames.tb_next
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        frames = _without_omegaconf(frames)
    return "".join(traceback.format_exception(type(error), error, frames))


def _without_omegaconf(frames: TracebackType | None) -> TracebackType | None:
    """Cut off a config's frames for reading a key: the mistake is in the reader's line."""
    here = frames
    while here is not None:
        inner = here.tb_next
        if inner is not None and "omegaconf" in _module(inner).split("."):
            here.tb_next = None
        here = here.tb_next
    return frames


def _module(frames: TracebackType) -> str:
    return str(frames.tb_frame.f_globals.get("__name__", ""))


def _pickled(error: BaseException) -> str:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be pickled but not unpickled
    except Exception:
        return ""
    if len(data) >= _LARGEST_ERROR_BYTES:
        return ""
    return base64.b64encode(data).decode()


def lacks_resolver(raised: BaseException) -> UserError | None:
    """Return one line about a resolver that this process lacks, or None for another error.
    OmegaConf's frames do not show the reason: the script registered the resolver only in the
    launcher."""
    error: BaseException | None = raised
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        match = _NO_RESOLVER.search(str(error))
        if isinstance(error, OmegaConfBaseException) and match is not None:
            key = f"{error.full_key}: " if error.full_key else ""
            return UserError(
                f"{key}no resolver {match[1]!r} in the attempt, a process of its own that imports "
                "the script: register it beside the imports, not under "
                'if __name__ == "__main__":'
            )
        error = error.__cause__ or error.__context__
    return None
