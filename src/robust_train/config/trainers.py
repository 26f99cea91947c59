"""Trainers by name or by value: how another process finds one, how jobs are called, what they
require.

The launcher creates a :class:`TrainerRef`, and the attempt's process imports the trainer by it.
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
from functools import partial
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from robust_train.compat import is_importing_main, signature_as_written
from robust_train.model.errors import ConfigError
from robust_train.readable import first_line

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig

MAIN_MODULE = "__mp_main__"
"""The name of a script while another process imports it, so that its guard holds:
:mod:`multiprocessing` uses the same name, and its processes look there for objects that an attempt
sends."""

PROGRAM_FILE = re.compile(r"\w\.(?:py|sh|bash|pl|R|r|jl|rb|js|lua|m)$")


@dataclass(frozen=True)
class MainModule:
    """The script that this process runs, for another process to find it."""

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
        # A folder or an archive that Python runs has no module of that name.
        return cls(os.path.abspath(file), "" if name == "__main__" else name)


@dataclass(frozen=True)
class TrainerRef:
    """A trainer by name, or by value if its name leads nowhere, as in a notebook."""

    path: str  # dotted path of the callable, `package.module.function`
    # The script that defines the callable, if it was defined in `__main__`.
    main: MainModule | None = None
    # The pickled callable, with everything that it uses.
    pickled: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, trainer: str | Callable[..., Any], *, inline: bool = False) -> TrainerRef:
        """Return the reference for a dotted path or a callable. Nothing is imported.

        With ``inline`` it runs in this process, so no other process has to find it.

        Raises:
            ConfigError: the module certainly does not exist, or the callable can neither be found
                by name nor pickled.
        """
        if isinstance(trainer, str):
            ref = cls(trainer)
            if not _is_module(ref.parts()[0]):
                raise ref.no_module()
            return ref
        if inline:
            return cls("inline.trainer")
        module, name = (str(getattr(trainer, key, "")) for key in ("__module__", "__qualname__"))
        main = MainModule.of_this_process()
        if _is_found(trainer, module, name):
            if module not in ("__main__", MAIN_MODULE):
                return cls(f"{module}.{name}")
            if name.isidentifier() and main and _defines(main, trainer):
                return cls(f"{MAIN_MODULE}.{name}", main)
        return cls(f"__main__.{name or type(trainer).__name__}", main, pickled=_by_value(trainer))

    @property
    def is_ours(self) -> bool:
        """Whether the trainer is a part of robust-train, and so a library."""
        return self.path.startswith("robust_train.")

    def parts(self) -> list[str]:
        """Return the names of the dotted path.

        Raises:
            ConfigError: it is not a dotted path.
        """
        parts = self.path.split(".")
        if not all(part.isidentifier() for part in parts) or len(parts) < 2:
            raise self.refused("accepted is the dotted path of a function, package.module.function")
        return parts

    def refused(self, why: str) -> ConfigError:
        """Return the refusal of this trainer."""
        return ConfigError(f"trainer._target_={self.path}: {why}")

    def no_module(self) -> ConfigError:
        """Return the refusal of a path that leads to no module."""
        return self.refused(
            f"no module {self.path.partition('.')[0]!r} on the Python path; start the command from "
            "its folder or set PYTHONPATH"
        )


class LaunchReached(BaseException):
    """A script without a guard reached its own call of ``launch``: everything that the trainer uses
    exists. It derives from BaseException, so the script's ``except Exception`` does not swallow it.
    """

    def __init__(self, trainer: str) -> None:
        super().__init__(
            "launch() is called wherever the script is imported, also by processes that it starts; "
            'put the call under: if __name__ == "__main__":'
        )
        self.trainer = trainer  # the trainer's dotted path


def end_import_at_launch(trainer: Trainer | None) -> None:
    """End the import of a script without a guard when it calls ``launch``: in its attempt, and in
    processes that :mod:`multiprocessing` starts."""
    if is_importing_main():
        raise LaunchReached("" if trainer is None else name_of(trainer))


def _is_found(trainer: object, module: str, name: str) -> bool:
    """Return whether its name leads to it, unlike the name of an object's method or a decorated
    copy."""
    try:
        return bool(attrgetter(name)(sys.modules[module]) == trainer)
    except (KeyError, AttributeError):
        return False


def _is_module(name: str) -> bool:
    """Return whether a top-level module with this name exists, without importing it."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    # The module was put there by hand.
    except (ImportError, ValueError, AttributeError):
        return PathFinder.find_spec(name) is not None


def _defines(main: MainModule, trainer: Callable[..., Any]) -> bool:
    """Return whether the script defines the trainer: with ``python -i`` the prompt may do so."""
    try:
        source = inspect.getfile(inspect.unwrap(trainer))
    except TypeError:
        return True
    return os.path.realpath(source) == os.path.realpath(main.file)


def _by_value(trainer: Callable[..., Any]) -> bytes:
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


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return a callable's signature: its own, even if :func:`functools.wraps` names another
    function, unless it passes on all arguments. Then it is the signature of the wrapped function.

    Raises:
        TypeError, ValueError: it has no signature, like some callables in C.
    """
    signature = own_signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    wrapped = _wrapped_by(function)
    if wrapped is None or kinds.isdisjoint(VARIADIC):
        return signature
    return signature_of(wrapped)


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the arguments with which a callable itself can be called. Raises like
    :func:`signature_of`."""
    bare = _without_copied(function)
    return signature_as_written(bare, follow_wrapped=False)


def _without_copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable without a ``__signature__`` that ``functools.wraps`` copied."""
    if isinstance(function, partial):
        inner = _without_copied(function.func)
        return partial(inner, *function.args, **function.keywords)
    if isinstance(function, MethodType):
        return MethodType(_without_copied(function.__func__), function.__self__)
    copied = getattr(function, "__signature__", None)
    wrapped = getattr(function, "__wrapped__", None)
    if copied is not getattr(wrapped, "__signature__", None):
        return function
    if copied is None or not isinstance(function, FunctionType):
        return function
    bare = FunctionType(
        function.__code__, {}, argdefs=function.__defaults__, closure=function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return bare


def _wrapped_by(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the callable that a callable wraps, bound to the same object and arguments, or None if
    it wraps none."""
    if isinstance(function, partial):
        inner = _wrapped_by(function.func)
        if inner is None:
            return None
        return partial(inner, *function.args, **function.keywords)
    if isinstance(function, MethodType):
        inner = _wrapped_by(function.__func__)
        return None if inner is None else MethodType(inner, function.__self__)
    wrapped: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
    call = getattr(type(function), "__call__", None)  # noqa: B004
    if wrapped is None and isinstance(call, FunctionType):
        return _wrapped_by(MethodType(call, function))
    return wrapped


def target_of(config: RobustConfig) -> str:
    """Return the dotted path of the trainer in the config.

    Raises:
        ConfigError: the config names none.
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
    module, name = (getattr(trainer, key, "") for key in ("__module__", "__qualname__"))
    if module == MAIN_MODULE or not name:
        module = "__main__"
    return f"{module}.{name or type(trainer).__name__}"


def job_name_of(config: RobustConfig, trainer: Trainer) -> str:
    """Return the job's name in queue, tables and run folder."""
    target = name_of(trainer)
    if target.startswith("__main__."):
        # It is None in a notebook.
        script = getattr(sys.modules["__main__"], "__file__", None)
        target = target.replace("__main__.", f"{Path(script).stem}." if script else "", 1)
    return job_name(
        config.job_name, config.model.name, config.dataset.name, target, config.trainer.argv
    )


def job_name(
    chosen: object,
    model: object = None,
    dataset: object = None,
    target: str | None = None,  # the trainer's dotted path
    argv: Sequence[str] | None = None,  # a script's program
) -> str:
    """Return ``job_name``, else ``lora_flowers102``, else ``training.train`` of the trainer's path,
    or the script, empty if nothing names it."""
    is_own = target is not None and not target.startswith("robust_train.vision.")
    # These are our defaults, which the config of a user's trainer has as well.
    both = () if is_own and (model, dataset) == ("cnn", "digits") else (model, dataset)
    name = chosen
    if not name:
        name = "_".join(
            str(name_of_part) for name_of_part in both if name_of_part not in (None, "", "none")
        )
    path = [part for part in (target or "").split(".") if part != "<locals>"]
    if not name:
        name = name_of_program(argv) if argv else ".".join(path[-2:])
    return str(name)


def name_of_program(program: Sequence[str]) -> str:
    """Return the program's everyday name: ``train_clip`` for ``python src/train_clip.py --lr
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


_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}


def require(module: str, key: str, *, extra: str = "vision") -> Any:
    """Import and return ``module``. The error names ``key``, the override that needs it, and the
    ``extra`` of this package that installs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise ConfigError(
            f"{key}: needs {_DISTRIBUTIONS.get(package, package)}, which is not installed; "
            f'pip install "robust-train[{extra}]"'
        ) from error
