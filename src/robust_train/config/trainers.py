"""Refers to trainers, so that another process can import them, and names jobs after trainers.

The launcher creates a :class:`TrainerRef` from a callable or its dotted path. The attempt's process
imports the trainer by that reference, or unpickles it if no other process can import it, for
example if it was defined in a notebook.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_train.compat import is_importing_main
from robust_train.model.errors import ConfigError
from robust_train.readable import first_line

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig

MAIN_MODULE = "__mp_main__"
"""The name of a script's module while an attempt imports it, so that the code under its guard
``if __name__ == "__main__":`` does not run. :mod:`multiprocessing` uses the same name, so it can
unpickle an attempt's objects."""

PROGRAM_FILE = re.compile(r"\w\.(?:py|sh|bash|pl|R|r|jl|rb|js|lua|m)$")


@dataclass(frozen=True)
class MainModule:
    """The script that this process runs, so that another process can import it."""

    file: str
    name: str = ""  # the module's name, if it runs as ``python -m package.module``

    @classmethod
    def of_this_process(cls) -> MainModule | None:
        """Return the script, or None in a notebook, a REPL, or a script from standard input."""
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        if file is None or not os.path.isfile(file):
            return None
        name = getattr(getattr(main, "__spec__", None), "name", "")
        # A folder or an archive that Python runs is named "__main__", which cannot be imported.
        return cls(os.path.abspath(file), "" if name == "__main__" else name)


@dataclass(frozen=True)
class TrainerRef:
    """A reference to a trainer by its name, or by its pickled value if no other process can import
    the name."""

    path: str  # dotted path of the callable, `package.module.function`
    # The script that defines the callable, if it was defined in `__main__`.
    main: MainModule | None = None
    # The pickled callable, with everything that it uses.
    pickled: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, trainer: str | Callable[..., Any], *, inline: bool = False) -> TrainerRef:
        """Return the reference for a dotted path or a callable. Nothing is imported.

        With ``inline``, the trainer runs in this process, so no reference is needed.

        Raises:
            ConfigError: the module does not exist, or the callable can neither be found by name nor
                pickled.
        """
        if isinstance(trainer, str):
            ref = cls(trainer)
            if not _is_module(ref.parts()[0]):
                raise ref.no_module()
            return ref
        if inline:
            return cls("inline.trainer")
        module = str(getattr(trainer, "__module__", ""))
        name = str(getattr(trainer, "__qualname__", ""))
        main = MainModule.of_this_process()
        if _is_found(trainer, module, name):
            if module not in ("__main__", MAIN_MODULE):
                return cls(f"{module}.{name}")
            if name.isidentifier() and main and _defines(main, trainer):
                return cls(f"{MAIN_MODULE}.{name}", main)
        return cls(f"__main__.{name or type(trainer).__name__}", main, pickled=_pickle(trainer))

    @property
    def is_ours(self) -> bool:
        """Whether the trainer is part of robust-train."""
        return self.path.startswith("robust_train.")

    def parts(self) -> list[str]:
        """Return the names of the dotted path.

        Raises:
            ConfigError: it is not a dotted path.
        """
        parts = self.path.split(".")
        if not all(part.isidentifier() for part in parts) or len(parts) < 2:
            raise self.refused("must be the dotted path of a function, package.module.function")
        return parts

    def refused(self, why: str) -> ConfigError:
        """Return the error for a trainer that cannot be used."""
        return ConfigError(f"trainer._target_={self.path}: {why}")

    def no_module(self) -> ConfigError:
        """Return the error for a path whose module does not exist."""
        return self.refused(
            f"no module {self.path.partition('.')[0]!r} on the Python path; start the command in "
            "its folder or set PYTHONPATH"
        )


class LaunchReached(BaseException):
    """Raised when an attempt imports a script without a ``__main__`` guard and reaches its call of
    ``launch``. Everything that the trainer uses exists by then, so the import ends there.

    It derives from BaseException, so that the script's ``except Exception`` does not catch it.

    Attributes:
        trainer: the trainer's dotted path.
    """

    def __init__(self, trainer: str) -> None:
        super().__init__(
            "launch() is called wherever the script is imported, also by processes that it starts; "
            'put the call under: if __name__ == "__main__":'
        )
        self.trainer = trainer


def end_import_at_launch(trainer: Trainer | None) -> None:
    """End the import of a script without a ``__main__`` guard when it calls ``launch``. Attempts
    and processes that :mod:`multiprocessing` starts import the script.

    Raises:
        LaunchReached: this process is importing the script.
    """
    if is_importing_main():
        raise LaunchReached("" if trainer is None else name_of(trainer))


def _is_found(trainer: object, module: str, name: str) -> bool:
    """Return whether a name in a module refers to the trainer itself. The name of a bound method or
    of a decorated copy refers to another object."""
    try:
        return bool(attrgetter(name)(sys.modules[module]) == trainer)
    except (KeyError, AttributeError):
        return False


def _is_module(name: str) -> bool:
    """Return whether a top-level module with this name exists, without importing it."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        # A module that a program put into sys.modules by hand may have no spec.
        return PathFinder.find_spec(name) is not None


def _defines(main: MainModule, trainer: Callable[..., Any]) -> bool:
    """Return whether the script's file defines the trainer. With ``python -i``, it may have been
    defined at the prompt."""
    try:
        source = inspect.getfile(inspect.unwrap(trainer))
    except TypeError:
        return True
    return os.path.realpath(source) == os.path.realpath(main.file)


def _pickle(trainer: Callable[..., Any]) -> bytes:
    """Pickle a trainer by value.

    Raises:
        ConfigError: the trainer uses an object that cannot be pickled.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(trainer))
    except Exception as error:
        raise ConfigError(
            f"trainer={getattr(trainer, '__qualname__', trainer)!s}: cannot be sent to a separate "
            f"process: {first_line(error)}; create its objects inside the function, or use "
            "isolation=none"
        ) from None


Trainer = str | Callable[..., Any]


def target_of(config: RobustConfig) -> str:
    """Return the dotted path of the trainer in the config.

    Raises:
        ConfigError: the config names no trainer.
    """
    if config.target is None:
        raise ConfigError(
            "trainer._target_: missing; give the dotted path of a function "
            "trainer(cfg) or trainer(cfg, run)"
        )
    return config.target


def name_of(trainer: Trainer) -> str:
    """Return a trainer's dotted path, or a callable's module and qualified name."""
    if isinstance(trainer, str):
        return trainer
    module = getattr(trainer, "__module__", "")
    name = getattr(trainer, "__qualname__", "")
    if module == MAIN_MODULE or not name:
        module = "__main__"
    return f"{module}.{name or type(trainer).__name__}"


def job_name_of(config: RobustConfig, trainer: Trainer) -> str:
    """Return the job's name in the queue, in tables and in its run folder's name."""
    target = name_of(trainer)
    if target.startswith("__main__."):
        target = target.removeprefix("__main__.")
        # A notebook has no file.
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script:
            target = f"{Path(script).stem}.{target}"
    return job_name(
        config.job_name, config.model.name, config.dataset.name, target, config.trainer.argv
    )


def job_name(
    chosen: object,
    model: object = None,
    dataset: object = None,
    target: str | None = None,
    argv: Sequence[str] | None = None,
) -> str:
    """Return a name for a job, the first known name in this list.

    1. The user's ``job_name``.
    2. Model and dataset, such as ``lora_flowers102``.
    3. The script, such as ``train_clip``.
    4. The end of the trainer's path, such as ``training.train``.

    Args:
        chosen: ``job_name``.
        model: the model's name.
        dataset: the dataset's name.
        target: the trainer's dotted path.
        argv: a script's program and arguments.
    """
    if chosen:
        return str(chosen)
    is_built_in = target is None or target.startswith("robust_train.vision.")
    # The defaults of model and dataset are also in the config of a user's own trainer, which does
    # not use them.
    if is_built_in or (model, dataset) != ("cnn", "digits"):
        parts = [str(part) for part in (model, dataset) if part not in (None, "", "none")]
        if parts:
            return "_".join(parts)
    if argv:
        return name_of_program(argv)
    path = [part for part in (target or "").split(".") if part != "<locals>"]
    return ".".join(path[-2:])


def name_of_program(program: Sequence[str]) -> str:
    """Return a short name for a program, such as ``train_clip`` for ``python src/train_clip.py --lr
    1``."""
    for word in program:
        name = Path(word).name
        if PROGRAM_FILE.search(name):
            return Path(name).stem
    if "-m" in program[1:-1]:
        return program[program.index("-m", 1) + 1]
    return Path(program[0]).name or "script"


def folder_name(*about: Any) -> str:
    """Return a job's name as a part of its run folder's name. ``about`` are the arguments of
    :func:`job_name`."""
    name = re.sub(r"[^\w.-]+", "_", job_name(*about) or "job")
    # File systems take 255 bytes.
    return name.encode()[:200].decode(errors="ignore")


# Packages on PyPI whose names differ from the names of their modules.
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}


def require(module: str, key: str, *, extra: str = "vision") -> Any:
    """Import and return ``module``. The error names ``key``, the override that needs it, and the
    ``extra`` of this package that installs it.

    Raises:
        ConfigError: ``module`` is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise ConfigError(
            f"{key}: needs {_DISTRIBUTIONS.get(package, package)}, which is not installed; "
            f'pip install "robust-train[{extra}]"'
        ) from error
