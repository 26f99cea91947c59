"""The doors: what ``train_robust.py``, ``train.py`` and a project's ``main.py`` do around a job.

A user's mistake ends in one line and exit code 2; a trainer's bug in its own traceback and 1.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from robust_train.errors import EXIT_BAD_CONFIG, EXIT_FAILED, ConfigError

_FULL_ERROR = "HYDRA_FULL_ERROR"
_PACKAGE = "robust_train.configs"
_CONFIGS = f"pkg://{_PACKAGE}"


def open_robust(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a job, or with ``-m`` a sweep, under the launcher: ``train_robust.py``. ``arguments`` are
    those of ``robust-train train``, which is the same from any folder."""
    if arguments is not None:
        sys.argv = ["robust-train train", *arguments]  # Hydra reads it there
    _prepare_process()
    _see_modules_here()
    from robust_train.execution.screen import never_blocking_output

    with never_blocking_output():
        libraries = _libraries(sys.argv[1:])
        if libraries is not None:
            # they are imported over there while Hydra is imported and composes here
            from robust_train.execution import at_hand

            at_hand.warm_up(libraries)
        from robust_train.cli import jobs

        code = _open(jobs.robust_job, "robust", name="train_robust")
    sys.exit(code)


def open_plain() -> None:
    """Run ``python train.py``: one attempt in this process, without remedies."""
    _prepare_process()
    _see_modules_here()
    from robust_train.execution.environment import shared_machine_environment

    os.environ.update(shared_machine_environment(os.environ))
    from robust_train.cli import jobs

    sys.exit(_open(jobs.plain_job, "config", name="train"))


def hydra_main(
    config_path: str = "conf", config_name: str = "config"
) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Decorate a project's ``main(cfg)``: ``hydra.main`` with one-line mistakes and our exit codes.

    Args:
        config_path: folder of the configs, relative to the file that defines ``main``.
        config_name: the primary config, without ``.yaml``.
    """

    def decorate(task: Callable[[Any], Any]) -> Callable[[], None]:
        @functools.wraps(task)
        def job(cfg: Any) -> Any:
            from robust_train.cli import jobs

            with jobs.refused_in_one_line():
                return task(cfg)

        @functools.wraps(task)
        def main() -> None:
            from robust_train.execution.trainer_ref import MAIN_MODULE

            if task.__module__ == MAIN_MODULE:
                return  # a script without a guard, imported by its own attempt
            _prepare_process()
            folder = Path(inspect.getfile(task)).resolve().parent / config_path
            code = _open(job, config_name, config_path=str(folder))
            if code:
                sys.exit(code)

        return main

    return decorate


def _see_modules_here() -> None:
    """Have a trainer's module found in the working directory, as ``python -m`` does."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())


def _prepare_process() -> None:
    """Open closed standard streams, which Hydra takes to be there; end this process without a
    traceback at a signal that comes before or after the job."""
    from robust_train.execution.screen import open_closed_streams

    open_closed_streams()

    def end(signum: int, frame: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, end)


def _open(
    task: Callable[[Any], Any], config_name: str, *, config_path: str = _CONFIGS, name: str = ""
) -> int:
    """Compose the config and run the job or sweep; return the exit code. ``name`` is that of our
    own command, empty for a project's."""
    if name and {"--help", "-h"} & set(sys.argv[1:]):
        from robust_train.execution.screen import never_blocking_output

        with never_blocking_output():  # it ends quietly where ``| head`` has seen enough
            print(help_text(name), end="")
        return 0
    import hydra

    from robust_train import compat
    from robust_train.cli import jobs
    from robust_train.config.refusals import REFUSALS, explain, explain_option
    from robust_train.execution import at_hand
    from robust_train.nodes.place import node_in
    from robust_train.sweep import session
    from robust_train.sweep.plugins_of_others import known_problem

    if name:
        if "--version" in sys.argv[1:]:
            print(f"{name} of robust-train {importlib.metadata.version('robust-train')}")
            return 0
        # names the log file; Hydra would call the job after the module that the task is defined in
        os.environ.setdefault("HYDRA_MAIN_MODULE", name)
    if (mistake := explain_option(sys.argv[1:], config_name, config_path)) is not None:
        print(mistake, file=sys.stderr)
        return EXIT_BAD_CONFIG
    nodes = [one[len("num_nodes=") :] for one in sys.argv if one.startswith("num_nodes=")]
    if node_in(os.environ, nodes[-1] if nodes else 1):  # the leader alone writes the config
        sys.argv.append("hydra.output_subdir=null")
    session.program.has_door = True
    session.program.check = jobs.check if name else None
    user_wants_everything = os.environ.get(_FULL_ERROR) == "1"
    # otherwise Hydra prints errors its own way and exits with 1
    os.environ[_FULL_ERROR] = "1"
    composes_once = bool(name) and not may_set_mode(sys.argv[1:])
    try:
        with compat.mode_of_command_line() if composes_once else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)(task)()
        code = jobs.ending.code
    except KeyboardInterrupt as error:  # JobInterrupted among them
        code = getattr(error, "exit_code", 130)
    except Exception as error:
        if user_wants_everything:
            traceback.print_exc()
        frames = traceback.walk_tb(error.__traceback__)
        found: int | None = None
        if any(frame.f_code is task.__code__ for frame, _ in frames):
            found = jobs.exit_code_of_error(error)
        elif isinstance(error, REFUSALS):
            print(explain(error, config_name, sys.argv[1:], config_path), file=sys.stderr)
            found = EXIT_BAD_CONFIG
        elif problem := known_problem(error):
            print(problem[0], file=sys.stderr)
            found = jobs.ending.code or problem[1]
        if found is None and not user_wants_everything:
            raise
        code = found or EXIT_FAILED
    finally:
        at_hand.discard()
    try:
        # jobs in processes of their own leave their exit codes in their run folders
        of_the_sweep = session.finish()
    except KeyboardInterrupt:
        of_the_sweep = 130
    return code or of_the_sweep


def may_set_mode(arguments: list[str]) -> bool:
    """Return whether an argument or a config may set ``hydra.mode``."""
    words = ("hydra.mode", "hydra.searchpath")
    if any(one.startswith(("-c", "--c")) or any(w in one for w in words) for one in arguments):
        return True
    folder = Path(__file__).parents[1] / "configs"
    return any("mode:" in file.read_text("utf-8").split() for file in folder.rglob("*.yaml"))


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

keys people use{only}:
  min_gpu_memory_mb=4000         MiB that must be free before a GPU is taken
  wait_for_gpu=true              wait until a GPU has them
  gpu_wait_timeout_minutes=60    and for how long
  num_gpus=1                     GPUs for this one job, one process each
  auto_device=true device=auto   false and cuda:1, cpu or a UUID: choose the device yourself
  gpu_jobs_per_device=1          jobs that may share a GPU with this one
  allow_cpu_fallback=true        train on the CPU when no GPU will do
  training.batch_size=64         micro-batch size; auto: the largest that fits
  training.effective_batch_size  samples per optimizer step; accumulation follows from it
  min_batch_size=4               no attempt uses a smaller micro-batch
  max_retries=3                  smaller micro-batches tried on one device before the next
  memory.fraction=0.95           the most of the GPU's memory that an attempt may take
  resume=true                    resume an unfinished job in its run folder
  stall_timeout_minutes=auto     without progress for so long: a new attempt; 0: never
  detach=false                   true: go on in the background, past logout
  job_name=NAME                  how queue, tables and run folder call the job
  hydra.run.dir=FOLDER           the run folder; with an unfinished job in it: go on

more: --cfg job (every key with its value), --hydra-help (Hydra's options), --version
      robust-train completion (for bash and zsh), docs/configuration.md (what every key means)
"""


def help_text(name: str) -> str:
    """Return the help of ``train_robust.py`` or ``train.py``, by the command that was run."""
    choices = "\n".join(f"  {group:<8} {', '.join(names)}" for group, names in groups().items())
    only = "" if name == "train_robust" else " (those about devices and retries: train_robust.py)"
    command = sys.argv[0] if sys.argv[0].startswith("robust-train ") else f"python {name}.py"
    return _HELP.format(command=command, groups=choices, only=only)


def groups() -> dict[str, list[str]]:
    """Return the choices of each config group that people choose from."""
    found = {}
    for group in ("model", "dataset", "trainer"):
        files = sorted(one.name for one in resources.files(f"{_PACKAGE}.{group}").iterdir())
        found[group] = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
    return found
