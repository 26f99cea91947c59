"""The doors: what ``train_robust.py`` and ``train.py`` do before and after the job itself.

A user's mistake ends in one line and exit code 2; a trainer's bug in its own traceback and 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import robust_train
from robust_train.errors import EXIT_BAD_CONFIG, EXIT_FAILED, ConfigError, JobInterrupted

if TYPE_CHECKING:
    from robust_train.cli.jobs import Ending

_FULL_ERROR = "HYDRA_FULL_ERROR"
_CONFIGS = "pkg://robust_train.configs"


def open_robust() -> None:
    """``python train_robust.py``: run a job, or with ``-m`` a sweep, under the launcher."""
    _end_quietly_at_signals()
    from robust_train.execution.screen import never_blocking_output

    with never_blocking_output():
        libraries = _libraries(sys.argv[1:])
        if libraries is not None:
            # they are imported over there while Hydra is imported and composes here
            from robust_train.execution import at_hand

            at_hand.warm_up(libraries)
        from robust_train.cli import jobs

        code = _open(jobs.robust_job, "train_robust", "robust", jobs.ending)
    sys.exit(code)


def open_plain() -> None:
    """``python train.py``: the same trainer, one run in this process, no supervision."""
    _end_quietly_at_signals()
    from robust_train.execution.environment import shared_machine_environment

    os.environ.update(shared_machine_environment(os.environ))
    from robust_train.cli import jobs

    sys.exit(_open(jobs.plain_job, "train", "config", jobs.ending))


def _end_quietly_at_signals() -> None:
    """End this process without a traceback at a signal that comes before or after the job."""

    def end(signum: int, frame: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, end)


def _open(job: Callable[[Any], Any], name: str, config_name: str, ending: Ending) -> int:
    """Compose the config and run the job or sweep; return the exit code."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        return _help(name)
    import hydra

    from robust_train.config.refusals import REFUSALS, explain
    from robust_train.execution import at_hand
    from robust_train.sweep import session
    from robust_train.sweep.plugins_of_others import known_problem

    if "--version" in sys.argv[1:]:
        print(f"{name} of robust-train {robust_train.__version__}")
        return 0
    session.door_is_open()
    user_wants_everything = os.environ.get(_FULL_ERROR) == "1"
    # otherwise Hydra prints errors its own way and exits with 1
    os.environ[_FULL_ERROR] = "1"
    # names the log file; Hydra would call the job after the module that the task is defined in
    os.environ.setdefault("HYDRA_MAIN_MODULE", name)
    try:
        hydra.main(version_base="1.3", config_path=_CONFIGS, config_name=config_name)(job)()
        code = ending.code
    except REFUSALS as error:
        if user_wants_everything or ending.started:
            raise
        print(explain(error, config_name, sys.argv[1:]), file=sys.stderr)
        code = EXIT_BAD_CONFIG
    except JobInterrupted as error:
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except (RuntimeError, ValueError) as error:
        problem = known_problem(error)
        if problem is None:
            raise
        print(problem, file=sys.stderr)
        code = ending.code or EXIT_FAILED
    finally:
        at_hand.discard()
    try:
        # jobs in processes of their own leave their exit codes in their run folders
        of_the_sweep = session.finish()
    except KeyboardInterrupt:
        of_the_sweep = 130
    return code or of_the_sweep


def _help(name: str) -> int:
    from robust_train.cli.usage import help_text
    from robust_train.execution.screen import never_blocking_output

    with never_blocking_output():  # it ends quietly where ``| head`` has seen enough
        print(help_text(name), end="")
    return 0


def _libraries(arguments: list[str]) -> tuple[str, ...] | None:
    """Return what a fork server can import now, None where none will be of use (``--help``)."""
    given = dict(one.lstrip("+~").partition("=")[::2] for one in arguments if "=" in one)
    with_value = ("--config-name", "--config-dir", "--config-path", "-cn", "-cd", "-cp")
    flags = {one for one in arguments if one.startswith("-") and not one.startswith(with_value)}
    if flags - {"-m", "--multirun"} or given.get("isolation") == "none":
        return None
    # the jobs of other launchers start their own
    if given.get("hydra/launcher", "basic") != "basic":
        return None
    if given.get("trainer") == "command":
        return ()
    target = given.get("trainer._target_")
    if target is None:
        return ("torch",)
    from robust_train.execution.library_imports import libraries_of
    from robust_train.execution.trainer_ref import TrainerRef

    try:
        return libraries_of(TrainerRef(target))
    except ConfigError:  # the job reports it
        return None
