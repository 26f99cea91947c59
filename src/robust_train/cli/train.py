"""``robust-train train``, ``train_robust.py``, ``train.py`` and a project's ``main.py``.

The process that the user starts becomes the launcher. With ``train.py`` it trains as well. A
mistake in the configuration ends with one line and exit code 2, a bug in the trainer with its own
traceback and exit code 1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from robust_train.compat import HYDRAS_OWN
from robust_train.config.search_path import OF_COMMANDS, OURS, asking_for
from robust_train.config.values import SET_FOR_HYDRA_VARIABLE
from robust_train.host.engine import guest_rank
from robust_train.host.loggers import standard_error
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED, ConfigError

_MAIN_MODULE = "HYDRA_MAIN_MODULE"
_FULL_ERROR = "HYDRA_FULL_ERROR"
# a project's own config need not name our callback
_RECORD_SWEEPS = "++hydra.callbacks.robust_sweep._target_=robust_train.sweep.session.SweepCallback"


def train(arguments: list[str]) -> NoReturn:
    """Run ``robust-train train``, which is ``train_robust.py`` from any folder."""
    sys.argv[:] = ["robust-train train"]  # Hydra reads it there
    sys.argv += arguments
    open_robust()


def open_robust() -> NoReturn:
    """Run a job, or with ``-m`` a sweep, under the launcher: ``train_robust.py``."""
    _prepare_process()
    from robust_train.host.screen import never_blocking_output

    with (
        never_blocking_output(),  # ends quietly after ``| head``
        asking_for(OF_COMMANDS, OURS),
    ):
        _answer("train_robust")
        _start_early(sys.argv[1:])
        from robust_train.cli import jobs

        code = _open(jobs.robust_job, "robust", name="train_robust")
    sys.exit(code)


def open_plain() -> NoReturn:
    """Run ``python train.py``: an attempt in this process, without remedies."""
    _prepare_process()
    from robust_train.host.linux import shared_machine_environment
    from robust_train.host.screen import never_blocking_output

    with never_blocking_output():
        _answer("train")
    os.environ.update(shared_machine_environment(os.environ))
    from robust_train.cli import jobs

    with asking_for(OF_COMMANDS, OURS):
        code = _open(jobs.plain_job, "config", name="train")
    sys.exit(code)


def hydra_main(
    config_path: str | None = HYDRAS_OWN,
    config_name: str | None = None,
    version_base: str | None = HYDRAS_OWN,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a project's ``main(cfg)``, like ``hydra.main`` and with its defaults.

    If the config builds on ``robust``, ``main`` calls ``launch`` itself. Otherwise the launcher
    runs ``main`` as the trainer, and the config's group ``robust`` has the launcher's keys. A
    mistake in the config ends the program with one line and our exit codes.

    Args:
        config_path: folder of the configs, relative to the file that defines ``main``. None: they
            are in Hydra's ConfigStore.
        config_name: the primary config. None: no config, keys are added on the command line.
        version_base: the version of Hydra whose behaviour to follow. By default, Hydra 1.3 warns
            and follows 1.1: ``main`` runs in the run folder, and without ``config_path`` the
            configs are next to the file that defines it.

    Returns:
        A decorator. The decorated ``main()``, called without arguments, composes the config and
        runs the job.
    """

    def decorate(task: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(task)
        def job(cfg: Any) -> Any:
            from robust_train.cli import jobs

            return jobs.project_job(task, main, cfg)

        @functools.wraps(task)
        def main(cfg: Any = None, run: Any = None) -> Any:
            from robust_train import compat

            if run is not None:
                from robust_train.cli.adopted import call_task

                return call_task(task, cfg, run)
            if cfg is not None:  # called by the project's own code
                return task(cfg)
            if compat.is_importing_main():
                # a script without a guard, imported by its own attempt
                return None
            _prepare_process()
            with asking_for(OURS):
                code = _open(
                    job,
                    config_name,
                    config_path=_absolute(
                        compat.default_config_path(version_base)
                        if config_path is HYDRAS_OWN
                        else config_path,
                        task,
                    ),
                    version_base=version_base,
                )
            return sys.exit(code) if code else None

        return main

    return decorate


def _absolute(config_path: str | None, task: Callable[..., Any]) -> str | None:
    if config_path is None or config_path.startswith("pkg://"):
        return config_path
    return str(Path(inspect.getfile(task)).resolve().parent / config_path)


def _prepare_process() -> None:
    """Open closed standard streams, which Hydra writes to, and end without a traceback at a signal
    before or after the job."""
    from robust_train.host.needs import why_unusable
    from robust_train.host.screen import open_closed_streams

    open_closed_streams()
    lack = why_unusable()
    if lack is not None:
        print(lack, file=standard_error())
        sys.exit(lack.exit_code)

    def end(signum: int, frame: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, end)


def _open(
    task: Callable[[Any], Any],
    config_name: str | None,
    *,
    config_path: str | None = OURS,
    version_base: str | None = "1.3",
    name: str = "",
) -> int:
    """Compose the config, run the job or sweep, and return the exit code.

    Hydra reads the command line in ``sys.argv``, so what we add to it is put there.

    Args:
        task: the function for one job.
        config_name: the primary config.
        config_path: the folder of the configs.
        version_base: as in :func:`hydra_main`.
        name: the name of our own script, empty for a project's.
    """
    key = "device" if name else "robust.device"
    sys.argv[1:] = _with_list_of_gpus(sys.argv[1:], key)
    arguments = sys.argv[1:]
    import hydra

    from robust_train import compat
    from robust_train.children.interpreters import discard_early
    from robust_train.cli import jobs
    from robust_train.config.refusals import explain, explain_option
    from robust_train.sweep.session import session

    mistake = explain_option(arguments, config_name, config_path)
    if mistake is not None:
        print(mistake, file=standard_error())
        return EXIT_BAD_CONFIG
    try:
        more = _for_guest(arguments, name)
    except ConfigError as error:
        print(error, file=standard_error())
        return EXIT_BAD_CONFIG
    set_for_hydra = []
    if name:
        # names the log file; Hydra would name it after the module that defines the task
        if _MAIN_MODULE not in os.environ:
            os.environ[_MAIN_MODULE] = name
            set_for_hydra.append(_MAIN_MODULE)
    else:
        # a project's config may lack the keys of its group
        overrides = ["++" * argument.startswith("robust.") + argument for argument in arguments]
        sys.argv[1:] = overrides
        more.append(_RECORD_SWEEPS)
    sys.argv[1:] = compat.with_overrides(sys.argv[1:], more)
    session.sets_exit_code = True
    session.arguments = arguments
    session.check = jobs.check if name else None
    wants_traceback = os.environ.get(_FULL_ERROR) == "1"
    if not wants_traceback:
        # otherwise Hydra prints errors its own way and exits with 1
        os.environ[_FULL_ERROR] = "1"
        set_for_hydra.append(_FULL_ERROR)
    os.environ[SET_FOR_HYDRA_VARIABLE] = " ".join(set_for_hydra)
    composes_once = bool(name) and not may_set_mode(arguments)
    code = 0
    try:
        with compat.mode_of_command_line() if composes_once else contextlib.nullcontext():
            hydra.main(
                **compat.for_hydra(version_base), config_path=config_path, config_name=config_name
            )(task)()
    except KeyboardInterrupt as error:  # JobInterrupted among them
        code = getattr(error, "exit_code", 130)
    except Exception as error:
        if wants_traceback:
            traceback.print_exc()
        explained = _exit_code_of(
            error,
            task,
            lambda mistake: explain(mistake, config_name, arguments, config_path).replace(
                "++robust.", "robust."
            ),
        )
        if explained is None and not wants_traceback:
            raise
        code = explained or EXIT_FAILED
    finally:
        discard_early()
        if not wants_traceback:
            del os.environ[_FULL_ERROR]
        del os.environ[SET_FOR_HYDRA_VARIABLE]
    try:
        # jobs in processes of their own leave their exit codes in their run folders
        of_the_jobs = session.finish()
    except KeyboardInterrupt:
        of_the_jobs = 130
    return code or of_the_jobs


def _answer(name: str) -> None:
    """Print the help or the version of our own script and end, if the arguments ask for that.
    Otherwise make modules of the working directory importable, as ``python -m`` does."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(help_text(name), end="")
        sys.exit(0)
    if "--version" in arguments:
        print(f"{name} of robust-train {importlib.metadata.version('robust-train')}")
        sys.exit(0)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())


def _exit_code_of(
    error: Exception, task: Callable[[Any], Any], explained: Callable[[BaseException], str]
) -> int | None:
    """Print a user's mistake in one line, and return its exit code. None for other errors."""
    from robust_train.cli import jobs
    from robust_train.config.refusals import REFUSALS, exit_code_of
    from robust_train.sweep.checks import explain_plugin_error
    from robust_train.sweep.session import session

    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code is task.__code__ for frame, _ in frames):
        return jobs.exit_code_of_error(error)
    if isinstance(error, ValueError) and isinstance(error.__cause__, OSError):
        error = error.__cause__  # logging cannot open its file
    if isinstance(error, REFUSALS):
        print(explained(error), file=standard_error())
        return exit_code_of(error)
    problem = explain_plugin_error(error)
    if problem:
        print(problem[0], file=standard_error())
        return session.exit_code if session.exit_code else problem[1]
    return None


def _with_list_of_gpus(arguments: list[str], key: str) -> list[str]:
    """Return a command line in which ``device=2,3`` of a single job is a list, its only possible
    meaning."""
    if {"-m", "--multirun"} & set(arguments):
        return arguments
    several = re.compile(rf"(\+*{re.escape(key)})=(\d+(?:,\d+)+)")
    return [
        several.sub(r"\1=[\2]", argument) if several.fullmatch(argument) else argument
        for argument in arguments
    ]


def may_set_mode(arguments: list[str]) -> bool:
    """Return whether an argument chooses another config, which may set ``hydra.mode``."""
    keys = ("hydra.mode", "hydra.searchpath")
    chooses_config = any(word.startswith(("-c", "--c")) for word in arguments)
    return chooses_config or any(key in word for key in keys for word in arguments)


def _for_guest(arguments: list[str], name: str) -> list[str]:
    """Return overrides for a rank of torchrun, srun, … Raises ConfigError if this
    process cannot be one, or for a sweep."""
    guest = guest_rank(os.environ)
    if guest is None or name == "train":
        return []
    for word in ("-m", "--multirun"):
        if word in arguments:
            raise ConfigError(f"{word}: not as a rank of {guest.engine}; leave it out")
    overrides = []
    if name and not any(argument.startswith("hydra.run.dir=") for argument in arguments):
        overrides.append(f"hydra.run.dir={guest.folder}")
    if guest.rank:  # rank 0 alone writes the config and the log file
        overrides += ["hydra.output_subdir=null", "hydra/job_logging=stdout"]
    return overrides


def _start_early(arguments: list[str]) -> None:
    """Start the first attempt's interpreter while Hydra is imported and composes here."""
    with contextlib.suppress(ConfigError):  # the job reports it
        if guest_rank(os.environ) is not None:
            return  # a rank of another engine starts no process
    given = dict(argument.lstrip("+~").partition("=")[::2] for argument in arguments)
    # jobs of another Hydra launcher start their own interpreters
    launcher = given.get("hydra/launcher", "basic")
    if given.get("isolation") != "none" and launcher == "basic":
        from robust_train.children.interpreters import start_early

        is_built_in = not {"trainer", "trainer._target_"} & given.keys()
        start_early(("torch",) if is_built_in else ())


_HELP = """\
usage: {command} [KEY=VALUE ...]              one job
       {command} -m KEY=VALUE,VALUE [...]     a sweep, one job for each combination

examples:
  {command}
  {command} model=lora dataset=flowers102 training.epochs=5
  {command} training.batch_size=128 training.effective_batch_size=512
  {command} trainer._target_=my_project.training.train
  {command} -m model=lora,linear_probe training.lr=1e-3,1e-4

choices:
{groups}

keys people use (those about devices and retries: not with train.py):
  min_gpu_memory_mb=4000         MiB that must be free before a GPU is taken
  wait_for_gpu=true              wait until a GPU has them
  gpu_wait_timeout_minutes=60    and for how long
  num_gpus=1                     GPUs for this one job, one process each
  device=auto                    cuda:1, cpu or a UUID: choose the device yourself; cuda: any GPU
  gpu_jobs_per_device=1          jobs that may share a GPU with this one
  allow_cpu_fallback=true        train on the CPU when no GPU will do
  training.batch_size=64         micro-batch size; auto: the largest that fits
  training.effective_batch_size  samples per optimizer step; accumulation follows from it
  min_batch_size=4               no attempt uses a smaller micro-batch
  max_retries=3                  smaller micro-batches tried on one device before the next
  memory.fraction=0.95           the most of the GPU's memory that an attempt may take
  resume=true                    resume an unfinished job in its run folder
  stall_timeout_minutes=auto     without progress for so long: a new attempt; 0: never
  detach=false                   true: continue in the background, past logout
  job_name=NAME                  how queue, tables and run folder call the job
  hydra.run.dir=FOLDER           the run folder; with an unfinished job in it: continue

more: --cfg job (every key with its value), --hydra-help (Hydra's options), --version
      robust-train completion (for bash and zsh), docs/configuration.md (what every key means)
"""


def help_text(name: str) -> str:
    """Return the help of ``train_robust.py`` or ``train.py``, by the command that was run."""
    choices = [f"  {group:<8} {', '.join(names)}" for group, names in groups().items()]
    command = sys.argv[0]
    return _HELP.format(
        command=command if command.startswith("robust-train ") else f"python {name}.py",
        groups="\n".join(choices),
    )


def groups() -> dict[str, list[str]]:
    """Return the choices of each config group that people choose from."""
    package = OF_COMMANDS.removeprefix("pkg://")
    files_of: dict[str, list[str]] = {}
    for group in ("model", "dataset", "trainer"):
        files = [file.name for file in resources.files(f"{package}.{group}").iterdir()]
        names = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
        files_of[group] = sorted(names)
    return files_of
