"""The doors: what ``train_robust.py`` and ``train.py`` do before and after the job itself.

A user's mistake ends in one line and exit code 2; a trainer's bug in its own traceback and 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from robust_train.errors import EXIT_BAD_CONFIG, EXIT_FAILED, JobInterrupted

_FULL_ERROR = "HYDRA_FULL_ERROR"
_CONFIGS = "pkg://robust_train.configs"


def open_robust() -> None:
    """``python train_robust.py``: run a job, or with ``-m`` a sweep, under the launcher."""
    if _will_train_in_a_process(sys.argv[1:]):
        # torch is imported over there while Hydra is imported and composes here
        from robust_train.execution import at_hand

        at_hand.warm_up(warm="trainer=command" not in sys.argv)
    from robust_train.cli import jobs

    _open(jobs.robust_job, "train_robust", "robust", jobs.ending)


def open_plain() -> None:
    """``python train.py``: the same trainer, one run in this process, no supervision."""
    from robust_train.execution.environment import shared_machine_environment

    os.environ.update(shared_machine_environment(os.environ))
    from robust_train.cli import jobs

    _open(jobs.plain_job, "train", "config", jobs.ending)


def _open(job: Callable[[Any], Any], name: str, config_name: str, ending: Any) -> None:
    import hydra

    from robust_train.config.refusals import REFUSALS, explain
    from robust_train.execution import at_hand
    from robust_train.sweep import session
    from robust_train.sweep.plugins_of_others import known_problem

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
    sys.exit(code or of_the_sweep)


def _will_train_in_a_process(arguments: list[str]) -> bool:
    """Whether a warm fork server will be of use: not for ``--help`` and its like."""
    flags = {"-m", "--multirun"}
    # their jobs can use it; with Hydra's other launchers each job starts its own
    launchers = {"hydra/launcher=basic", "hydra/launcher=gpu_queue"}
    with_value = ("--config-name", "--config-dir", "--config-path", "-cn", "-cd", "-cp")
    for argument in arguments:
        if argument.startswith("-") and not (argument in flags or argument.startswith(with_value)):
            return False
        if argument.startswith("isolation=none"):
            return False
        if argument.startswith("hydra/launcher=") and argument not in launchers:
            return False
    return True
