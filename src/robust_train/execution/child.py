"""An attempt from the inside: call the trainer, and report how it ended as one event."""

from __future__ import annotations

import base64
import logging
import logging.config
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from robust_train.errors import ConfigError, Interrupted, UserError
from robust_train.execution.request import AttemptRequest, call_trainer
from robust_train.failures import classify_failure
from robust_train.run import Run, memory_in_use
from robust_train.values import Evidence, Failure, FailureKind

HALVE_BATCH = "halve_batch"
"""Why an attempt was asked to stop, as :attr:`robust_train.values.Outcome.stopped_for` has it."""

_TOLD_BY_ERRORS = ("others_know", "heard_of_rank")
"""What an exception of one of several ranks may say: the others have been told of it; it stands for
the failure of that other rank."""


def run_attempt(
    request: AttemptRequest,
    trainer: Callable[..., Any],
    run: Run,
    report: Callable[[dict[str, Any]], None],
) -> BaseException | None:
    """Run the trainer and report ``finished`` or ``failed``.

    Returns:
        The exception that ended it (for a caller in the same process), None if it completed.
    """
    error: BaseException | None = None
    ending: dict[str, Any]
    run.batch_search = request.batch_search
    try:
        result = call_trainer(trainer, request.cfg, run)
        ending = {"event": "finished", "result": plain(result)}
    except SystemExit as stop:
        if stop.code in (None, 0):
            ending = {"event": "finished", "result": None}
        else:
            error, ending = stop, _exit_event(stop)
    except BaseException as raised:
        error, ending = raised, _failure_event(raised)
    if run.stops_to_restart and (error is None or isinstance(error, Interrupted)):
        ending = _restart_event()
    report({**ending, "step": run.last_step, "memory": memory_in_use()})
    if run.memory_keeper is not None:
        run.memory_keeper.clean_up(error)
    return error


def _exit_event(stop: SystemExit) -> dict[str, Any]:
    message = f"the trainer called sys.exit({stop.code!r})"
    return _event(Failure(FailureKind.BUG, message), stop)


def _restart_event() -> dict[str, Any]:
    message = "stopped to go on with half the micro-batch"
    return {
        "event": "failed",
        "failure": failure_to_json(Failure(FailureKind.INTERRUPTED, message)),
        "stopped_for": HALVE_BATCH,
    }


def _failure_event(error: BaseException) -> dict[str, Any]:
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        failure = Failure(FailureKind.INTERRUPTED, str(error) or "interrupted")
    elif isinstance(error, (ConfigError, UserError)):
        failure = Failure(FailureKind.BUG, str(error))
    else:
        failure = classify_failure(error)
    return _event(failure, error)


def _event(failure: Failure, error: BaseException) -> dict[str, Any]:
    return {
        "event": "failed",
        "failure": failure_to_json(failure),
        "config_error": str(error) if isinstance(error, ConfigError) else None,
        "traceback": None if isinstance(error, UserError) else trainer_traceback(error),
        "error": _pickled(error),
        **{name: getattr(error, name) for name in _TOLD_BY_ERRORS if hasattr(error, name)},
    }


def trainer_traceback(error: BaseException) -> str:
    """The traceback as the trainer's author would see it: without the launcher's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "") in (
        __name__,
        call_trainer.__module__,
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _pickled(error: BaseException) -> str | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be dumped but not built again
    except Exception:
        return None
    return base64.b64encode(data).decode() if len(data) < 20_000 else None


def micro_batch_in_use(event: Mapping[str, Any]) -> int | None:
    """The size that the trainer's steps are split into after this event, None if it tells none."""
    if event["event"] == "micro_batch_changed" and event["training"]:
        return int(event["after"])
    if event["event"] == "micro_batch_exhausted" and event["training"]:
        return int(event["before"])
    return None


def finally_returned(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the final clean-up has returned, where this event tells of it."""
    if event["event"] != "memory_cleared" or event["reason"] not in ("end", "failure"):
        return None
    return {key: event[key] for key in event if key not in ("event", "reason", "step")}


def failure_to_json(failure: Failure) -> dict[str, Any]:
    """A failure in JSON's types."""
    return {**asdict(failure), "kind": failure.kind.value}


def failure_from_json(data: Mapping[str, Any]) -> Failure:
    """The inverse of :func:`failure_to_json`."""
    return Failure(
        kind=FailureKind(data["kind"]),
        message=data["message"],
        evidence=Evidence(**data["evidence"]),
        advice=tuple(data["advice"]),
        rank=data.get("rank"),
    )


def plain(value: Any) -> Any:
    """``value`` in JSON's types: what a trainer returned, for a process that has no torch.

    Numbers of any library become Python's, paths strings; containers are walked; the rest becomes
    its ``repr``.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, DictConfig):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain(value.item())
    return repr(value)


def adopt_hydra(hydra_cfg: DictConfig | None) -> None:
    """Give a fresh process the job's ``HydraConfig`` and logging; a plain format without Hydra."""
    if hydra_cfg is None:
        if not logging.getLogger().handlers:
            logging.basicConfig(
                level=logging.INFO,
                stream=sys.stdout,
                format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
            )
        return
    setup_globals()  # the resolvers that Hydra's own config uses, ${now:} among them
    instance = HydraConfig.instance()
    instance.cfg = hydra_cfg  # type: ignore[assignment]  # as Hydra itself sets it
    logging_cfg = hydra_cfg.hydra.get("job_logging")
    if logging_cfg is not None:
        settings = OmegaConf.to_container(logging_cfg, resolve=True)
        assert isinstance(settings, dict)
        logging.config.dictConfig({str(key): value for key, value in settings.items()})


def stop_on_sigterm(run: Run) -> None:
    """SIGTERM asks the trainer to stop; one that never looks is interrupted, and so at the second.

    Processes that the trainer forks (data-loader workers) get the default action back, or their
    parent could not end them.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        is_second = run._stop.is_set()
        run.request_stop()
        if is_second or not run.is_cooperative:
            raise Interrupted("stopped by SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
