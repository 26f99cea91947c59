"""Reads a job's folders, overrides and config from Hydra, and creates the job's run folder.

The launcher and the sweep use this module in the process in which Hydra runs. Outside of Hydra, the
functions fall back to the arguments of ``launch`` and to environment variables.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shlex
import shutil
import stat
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from robust_train.config.placeholders import EVENTS_VARIABLE, RUN_DIR_VARIABLE
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import folder_name
from robust_train.folder.secrets import public_command
from robust_train.gpu.processes import user_name
from robust_train.model.errors import make_folder_error

log = logging.getLogger("robust_train")

_LONGEST_COMMAND = 2000
_LIBRARIES = ("hydra", "hydra_plugins", "robust_train")
_NOBODY = 65534  # a user of another namespace, or root of another host
# Files of Hydra in a run folder, which exist before any file of this package.
OF_HYDRA = re.compile(r"\.hydra|(?!attempt-\d+\.).*\.log")
# Interpolations that differ between commands, and so between ranks or restarts.
_CHANGES = re.compile(r"\$\{(now|robust_pid)\b|\$\{hydra[.:]job\.(id|num)\b")
# Files that a run folder may contain before the first attempt.
_BEFORE_ATTEMPTS = re.compile(
    rf"{OF_HYDRA.pattern}|requests|lock|(job|resolved|state|summary)\.json|journal\.jsonl|"
    r"report\.html"
)


def run_folder(run_dir: str | Path | None, name: str) -> Path:
    """Create the run folder and return its path.

    It is the given folder, Hydra's folder, the folder in ``$ROBUST_TRAIN_RUN_DIR`` (for one call),
    or a new folder.

    Args:
        run_dir: the given folder, if any.
        name: the job's name, which becomes part of a new folder's name.

    Raises:
        ConfigError: the folder cannot be created.
        RunFolderUnavailableError: the folder cannot be created now.
    """
    path = chosen_folder(run_dir)
    if run_dir is None and path == _folder_in_environment():
        os.environ.pop(RUN_DIR_VARIABLE, None)
    try:
        if path is None:
            path = _new_folder(name)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = (
            f"run folder {path or error.filename}: cannot be created: {error.strerror}; "
            "choose another folder, with --run-dir or run_dir of launch()"
        )
        raise make_folder_error(problem, error) from error
    close_to_others(path)
    return path.resolve()


def chosen_folder(run_dir: str | Path | None) -> Path | None:
    """Return the run folder that the user or Hydra has chosen, None for a new folder."""
    if run_dir is not None:
        return Path(run_dir)
    if HydraConfig.initialized():
        return Path(HydraConfig.get().runtime.output_dir)
    return _folder_in_environment()


def _folder_in_environment() -> Path | None:
    # In a script that an attempt runs, the variable names the run folder of that attempt's job.
    given = os.environ.get(RUN_DIR_VARIABLE)
    is_free = EVENTS_VARIABLE not in os.environ
    return Path(given) if given and is_free else None


def _new_folder(name: str) -> Path:
    """Create a folder that no other job uses, and return its path.

    Raises:
        OSError: the folder cannot be created.
    """
    name = f"{folder_name(name)}_{os.getpid()}"
    first = Path("outputs") / time.strftime(f"%Y-%m-%d/%H-%M-%S_{name}")
    first.parent.mkdir(parents=True, exist_ok=True)
    path = first
    # A program may call launch() twice within a second.
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
        path = first.with_name(f"{first.name}_{number}")
    return path


def close_to_others(folder: Path) -> None:
    """Deny other users access to a new run folder, and warn if another user can replace its files.

    A folder with other files than Hydra's keeps its permissions, because it may have been used
    before or serve another purpose too.
    """
    with contextlib.suppress(OSError):
        if all(OF_HYDRA.fullmatch(name) for name in os.listdir(folder)):
            folder.chmod(0o700)
    with contextlib.suppress(OSError):
        status = folder.stat()
        user = ""
        if status.st_uid not in (0, os.geteuid(), _NOBODY):
            user = user_name(status.st_uid)
        elif status.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            user = "every user of this machine"
        if user:
            log.warning(
                "in the folder %s %s can replace the code and checkpoints of this job: choose "
                "another folder, or restrict it to your user (chown, chmod go-w)",
                folder,
                user,
            )


def changes_each_time() -> bool:
    """Return whether Hydra creates a new run folder for each command.

    It does not if the user or the project's config names a fixed folder.
    """
    config: Any = HydraConfig.instance().cfg
    run: Any = OmegaConf.to_container(config.hydra.run, resolve=False)
    return _CHANGES.search(str(run["dir"])) is not None


def remove_refused(folder: Path) -> None:
    """Remove the new run folder of a refused command, unless an attempt has left files in it."""
    with contextlib.suppress(OSError):
        if all(_BEFORE_ATTEMPTS.fullmatch(name) for name in os.listdir(folder)):
            shutil.rmtree(folder)
            folder.parent.rmdir()  # the folder of the day, if it is empty now


def sweep_folder() -> Path | None:
    """Return the folder of the sweep that this process's job belongs to, or None."""
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return None
    # The path is relative to the directory in which the user started the sweep. Hydra may have
    # changed the working directory since.
    return Path(str(hydra.runtime.cwd)) / str(hydra.sweep.dir)


def working_directory() -> str:
    """Return the directory in which the user ran the command, even if Hydra has changed it."""
    if HydraConfig.initialized():
        return str(HydraConfig.get().runtime.cwd)
    return os.getcwd()


def about_job(config: RobustConfig, name: str) -> dict[str, str]:
    """Return a job's name, model, data set, overrides and command, without secrets."""
    overrides: list[str] = []
    if HydraConfig.initialized():
        overrides = list(HydraConfig.get().overrides.task)
    about = {"name": name}
    for group, chosen in (("model", config.model), ("dataset", config.dataset)):
        # A user's own trainer need not use the default model and data set.
        if config.is_built_in or any(override.startswith(group) for override in overrides):
            about[group] = chosen.name or ""
    # With `python -c`, the command is a whole program.
    about["overrides"] = shlex.join(public_command(overrides))
    about["command"] = shlex.join(public_command(sys.orig_argv))[:_LONGEST_COMMAND]
    return {key: value for key, value in about.items() if value}


def owns_terminal(config: RobustConfig) -> bool:
    """Return whether stdout is a terminal that no debugger and no other job of a sweep uses."""
    # A program may have replaced stdout by an object without this method.
    is_terminal = getattr(sys.stdout, "isatty", lambda: False)
    if config.runs_inline or not is_terminal():
        return False
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return True
    return str(HydraConfig.get().launcher.get("_target_")).endswith(".BasicLauncher")


def composed_files(config: DictConfig | None = None) -> list[Path]:
    """Return the project's files from which Hydra composed a job's config.

    Config files of libraries are left out. The list is empty outside of Hydra.

    Args:
        config: the job's config with its part ``hydra``. The default is the config of the job that
            Hydra runs.
    """
    instance = GlobalHydra.instance()
    whole: Any = config
    if config is None:
        whole = HydraConfig.instance().cfg
    if whole is None or not instance.is_initialized():
        return []
    files: list[Path] = []
    # A missing list of files must not end a job.
    with contextlib.suppress(Exception):
        loader = instance.config_loader()
        hydra = whole.hydra
        sources = loader.get_search_path().get_path()
        folders = [_folder_of(str(source.path)) for source in sources]
        if not any(folders):  # computing the list of files would take a while
            return []
        entries = loader.compute_defaults_list(
            config_name=hydra.job.config_name,
            overrides=[*hydra.overrides.hydra, *hydra.overrides.task],
            run_mode=hydra.mode or RunMode.RUN,
        ).defaults
        for name in dict.fromkeys(entry.config_path for entry in entries):
            paths = [folder / f"{name}.yaml" for folder in folders if folder]
            files += [path for path in paths if path.is_file()][:1]
    return files


def _folder_of(source: str) -> Path | None:
    """Return the folder of an entry in Hydra's search path, or None for a library's entry."""
    kind, separator, place = source.partition("://")
    if not separator:
        return Path(source)
    if kind == "pkg" and place.partition(".")[0] not in _LIBRARIES:
        folder = resources.files(place)
        return folder if isinstance(folder, Path) else None
    return Path(place) if kind == "file" else None


def hydra_config() -> DictConfig | None:
    """Return Hydra's own part of the config, None outside of Hydra.

    The classes of the launcher and the sweeper are left out: if Hydra loads its plugins again, for
    example in joblib's workers, each class exists twice and pickle refuses it. References to the
    project's own keys are resolved, because the result does not contain those keys.
    """
    whole: Any = HydraConfig.instance().cfg
    if whole is None:
        return None
    config = whole.copy()
    with read_write(config.hydra), open_dict(config.hydra):
        if OmegaConf.is_config(whole.hydra.get("job_logging")):
            settings = OmegaConf.to_container(whole.hydra.job_logging, resolve=True)
            config.hydra.job_logging = settings
        for part in ("launcher", "sweeper"):
            if OmegaConf.is_config(config.hydra.get(part)):
                plain = OmegaConf.to_container(config.hydra[part], resolve=False)
                config.hydra[part] = plain
    return config  # type: ignore[no-any-return]
