"""The commands for which Hydra composes a config: ``robust-train train``, ``train_robust.py``,
``train.py`` and a project's ``main.py``.

Each prepares the process and calls Hydra, which calls a function of ``cli/jobs.py`` for each job.
The process becomes the launcher. With ``train.py`` it trains as well. A mistake in the config ends
with one line and exit code 2, a bug in the trainer with its own traceback and exit code 1.
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
# Added for a project, whose own config need not name our callback.
_RECORD_SWEEPS = "++hydra.callbacks.robust_sweep._target_=robust_train.sweep.session.SweepCallback"


def train(arguments: list[str]) -> NoReturn:
    """Run ``robust-train train``, which is ``train_robust.py`` from any folder."""
    # Hydra reads the command line there.
    sys.argv[:] = ["robust-train train", *arguments]
    open_robust()


def open_robust() -> NoReturn:
    """Run a job, or with ``-m`` a sweep, under the launcher: ``train_robust.py``."""
    _prepare_process()
    from robust_train.host.streams import never_blocking_output

    with never_blocking_output(), asking_for(OF_COMMANDS, OURS):
        _print_help_if_asked("train_robust")
        _import_from_working_directory()
        _start_early(sys.argv[1:])
        from robust_train.cli import jobs

        code = _run_hydra(jobs.robust_job, "robust", name="train_robust")
    sys.exit(code)


def open_plain() -> NoReturn:
    """Run ``python train.py``: an attempt in this process, without remedies."""
    _prepare_process()
    from robust_train.host.linux import shared_machine_environment
    from robust_train.host.streams import never_blocking_output

    with never_blocking_output():
        _print_help_if_asked("train")
    _import_from_working_directory()
    os.environ.update(shared_machine_environment(os.environ))
    from robust_train.cli import jobs

    with asking_for(OF_COMMANDS, OURS):
        code = _run_hydra(jobs.plain_job, "config", name="train")
    sys.exit(code)


def hydra_main(
    config_path: str | None = HYDRAS_OWN,
    config_name: str | None = None,
    version_base: str | None = HYDRAS_OWN,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a project's ``main(cfg)``, like ``hydra.main`` and with its defaults.

    If the config builds on ``robust``, ``main`` calls ``launch`` itself. Otherwise the launcher
    runs ``main`` as the trainer, and the launcher's keys are in the config's group ``robust``. A
    mistake in the config ends the program with one line and our exit codes.

    Args:
        config_path: folder of the configs, relative to the file that defines ``main``. None means
            that they are in Hydra's ConfigStore.
        config_name: the primary config. None means no config, and keys are added on the command
            line.
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
                from robust_train.cli.project_main import call_task

                return call_task(task, cfg, run)
            if cfg is not None:
                # The project's own code calls it.
                return task(cfg)
            if compat.is_importing_main():
                # An attempt imports a script that calls main() without a guard.
                return None
            _prepare_process()
            folder = config_path
            if folder is HYDRAS_OWN:
                folder = compat.default_config_path(version_base)
            folder = _resolve_config_path(folder, task)
            with asking_for(OURS):
                code = _run_hydra(job, config_name, config_path=folder, version_base=version_base)
            if code:
                sys.exit(code)
            return None

        return main

    return decorate


def _resolve_config_path(config_path: str | None, task: Callable[..., Any]) -> str | None:
    """Return the absolute path of a folder relative to the file that defines ``task``."""
    if config_path is None or config_path.startswith("pkg://"):
        return config_path
    return str(Path(inspect.getfile(task)).resolve().parent / config_path)


def _prepare_process() -> None:
    """Open closed standard streams, check the requirements of every command, and make a signal
    before or after the job end this process without a traceback."""
    from robust_train.host.needs import find_missing_requirement
    from robust_train.host.streams import open_closed_streams

    open_closed_streams()
    problem = find_missing_requirement()
    if problem is not None:
        print(problem, file=standard_error())
        sys.exit(problem.exit_code)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, _end_at_signal)


def _end_at_signal(signum: int, frame: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(128 + signum)


def _run_hydra(
    task: Callable[[Any], Any],
    config_name: str | None,
    *,
    config_path: str | None = OURS,
    version_base: str | None = "1.3",
    name: str = "",
) -> int:
    """Compose the config, run the job or sweep, and return the exit code.

    Hydra reads the command line in ``sys.argv``, so our own overrides are added there.

    Args:
        task: the function for one job.
        config_name: the primary config.
        config_path: the folder of the configs.
        version_base: as in :func:`hydra_main`.
        name: the name of our own script, empty for a project's ``main.py``.
    """
    key = "device" if name else "robust.device"
    sys.argv[1:] = _make_device_a_list(sys.argv[1:], key)
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
        added = _overrides_of_guest(arguments, name)
    except ConfigError as error:
        print(error, file=standard_error())
        return EXIT_BAD_CONFIG
    set_for_hydra = []
    if name:
        # Hydra names the log file after this variable, or else after the module of the task.
        if _MAIN_MODULE not in os.environ:
            os.environ[_MAIN_MODULE] = name
            set_for_hydra.append(_MAIN_MODULE)
    else:
        # With "++", because a project's config may lack the keys of our group.
        sys.argv[1:] = [
            f"++{argument}" if argument.startswith("robust.") else argument
            for argument in arguments
        ]
        added.append(_RECORD_SWEEPS)
    sys.argv[1:] = compat.add_overrides(sys.argv[1:], added)
    session.sets_exit_code = True
    session.arguments = arguments
    session.check = jobs.check_before_sweep if name else None
    wants_traceback = os.environ.get(_FULL_ERROR) == "1"
    if not wants_traceback:
        # Without it, Hydra prints errors in its own way and exits with 1.
        os.environ[_FULL_ERROR] = "1"
        set_for_hydra.append(_FULL_ERROR)
    os.environ[SET_FOR_HYDRA_VARIABLE] = " ".join(set_for_hydra)
    composes_once = bool(name) and not may_set_mode(arguments)
    code = 0
    try:
        with compat.skip_mode_lookup() if composes_once else contextlib.nullcontext():
            hydra.main(
                **compat.version_base_options(version_base),
                config_path=config_path,
                config_name=config_name,
            )(task)()
    except KeyboardInterrupt as error:
        # A JobInterrupted has its own exit code.
        code = getattr(error, "exit_code", 130)
    except Exception as error:
        if wants_traceback:
            traceback.print_exc()

        def explain_mistake(mistake: BaseException) -> str:
            line = explain(mistake, config_name, arguments, config_path)
            return line.replace("++robust.", "robust.")

        code_of_mistake = _print_mistake(error, task, explain_mistake)
        if code_of_mistake is None and not wants_traceback:
            raise
        code = code_of_mistake or EXIT_FAILED
    finally:
        discard_early()
        if not wants_traceback:
            del os.environ[_FULL_ERROR]
        del os.environ[SET_FOR_HYDRA_VARIABLE]
    try:
        # Jobs in other processes leave their exit codes in their run folders.
        code_of_jobs = session.finish()
    except KeyboardInterrupt:
        code_of_jobs = 130
    return code or code_of_jobs


def _print_help_if_asked(name: str) -> None:
    """Print the help or the version of our own script and end, if the arguments ask for it."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(help_text(name), end="")
        sys.exit(0)
    if "--version" in arguments:
        print(f"{name} of robust-train {importlib.metadata.version('robust-train')}")
        sys.exit(0)


def _import_from_working_directory() -> None:
    """Make modules of the working directory importable, like ``python -m``."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())


def _print_mistake(
    error: Exception, task: Callable[[Any], Any], explain_mistake: Callable[[BaseException], str]
) -> int | None:
    """Print a user's mistake in one line, and return its exit code. Print nothing and return None
    for other errors."""
    from robust_train.cli import jobs
    from robust_train.config.refusals import REFUSALS, exit_code_of
    from robust_train.sweep.checks import explain_plugin_error
    from robust_train.sweep.session import session

    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code is task.__code__ for frame, _ in frames):
        return jobs.print_with_exit_code(error)
    if isinstance(error, ValueError) and isinstance(error.__cause__, OSError):
        # Logging could not open its file.
        error = error.__cause__
    if isinstance(error, REFUSALS):
        print(explain_mistake(error), file=standard_error())
        return exit_code_of(error)
    problem = explain_plugin_error(error)
    if problem:
        print(problem[0], file=standard_error())
        return session.exit_code if session.exit_code else problem[1]
    return None


def _make_device_a_list(arguments: list[str], key: str) -> list[str]:
    """Return the command line with ``device=[2,3]`` for ``device=2,3``. In a sweep, the latter
    means two jobs, but a single job can only mean a list."""
    if {"-m", "--multirun"} & set(arguments):
        return arguments
    several_gpus = re.compile(rf"^(\+*{re.escape(key)})=(\d+(?:,\d+)+)\Z")
    return [several_gpus.sub(r"\1=[\2]", argument) for argument in arguments]


def may_set_mode(arguments: list[str]) -> bool:
    """Return whether an argument chooses another config, which may set ``hydra.mode``."""
    keys = ("hydra.mode", "hydra.searchpath")
    chooses_config = any(word.startswith(("-c", "--c")) for word in arguments)
    return chooses_config or any(key in word for key in keys for word in arguments)


def _overrides_of_guest(arguments: list[str], name: str) -> list[str]:
    """Return the overrides to add if this process is a rank of an engine such as torchrun or srun.

    Raises:
        ConfigError: the engine's variables contradict each other, or the command is a sweep.
    """
    guest = guest_rank(os.environ)
    if guest is None or name == "train":
        return []
    for word in ("-m", "--multirun"):
        if word in arguments:
            raise ConfigError(f"{word}: not as a rank of {guest.engine}; leave it out")
    overrides = []
    if name and not any(argument.startswith("hydra.run.dir=") for argument in arguments):
        overrides.append(f"hydra.run.dir={guest.folder}")
    if guest.rank:
        # Only rank 0 writes the config and the log file.
        overrides += ["hydra.output_subdir=null", "hydra/job_logging=stdout"]
    return overrides


def _start_early(arguments: list[str]) -> None:
    """Start the first attempt's interpreter now, so that it starts while Hydra composes here."""
    # The job will report a ConfigError.
    with contextlib.suppress(ConfigError):
        if guest_rank(os.environ) is not None:
            # A rank of an engine starts no process.
            return
    given = dict(argument.lstrip("+~").partition("=")[::2] for argument in arguments)
    # Jobs of another Hydra launcher start their own interpreters.
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

frequent keys (keys about devices and retries do not apply to train.py):
  min_gpu_memory_mb=4000         MiB that must be free on a GPU before it is taken
  wait_for_gpu=true              wait until a GPU has this much free memory
  gpu_wait_timeout_minutes=60    longest wait for a GPU
  num_gpus=1                     GPUs for this one job, one process each
  device=auto                    cuda:1, cpu or a UUID: choose the device yourself; cuda: any GPU
  gpu_jobs_per_device=1          jobs that may share a GPU with this one
  allow_cpu_fallback=true        train on the CPU if no GPU is suitable
  training.batch_size=64         micro-batch size; auto: the largest that fits
  training.effective_batch_size  samples per optimizer step; accumulation follows from it
  min_batch_size=4               no attempt uses a smaller micro-batch
  max_retries=3                  smaller micro-batches tried on one device before the next
  memory.fraction=0.95           share of the GPU's memory that an attempt may take
  resume=true                    resume an unfinished job in its run folder
  stall_timeout_minutes=auto     start a new attempt after this long without progress; 0: never
  detach=false                   true: continue in the background, past logout
  job_name=NAME                  name of the job in the queue, tables and run folder
  hydra.run.dir=FOLDER           the run folder; an unfinished job in it is resumed

more: --cfg job (every key with its value), --hydra-help (Hydra's options), --version
      robust-train completion (for bash and zsh), docs/configuration.md (meaning of every key)
"""


def help_text(name: str) -> str:
    """Return the help of ``train_robust.py`` or ``train.py``."""
    choices = [f"  {group:<8} {', '.join(names)}" for group, names in list_choices().items()]
    command = f"python {name}.py"
    if sys.argv[0].startswith("robust-train "):
        command = sys.argv[0]
    return _HELP.format(command=command, groups="\n".join(choices))


def list_choices() -> dict[str, list[str]]:
    """Return the choices of each config group of our own commands."""
    package = OF_COMMANDS.removeprefix("pkg://")
    choices: dict[str, list[str]] = {}
    for group in ("model", "dataset", "trainer"):
        files = [file.name for file in resources.files(f"{package}.{group}").iterdir()]
        names = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
        choices[group] = sorted(names)
    return choices
