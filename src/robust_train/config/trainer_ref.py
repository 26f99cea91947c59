"""A trainer by name, so that another process can import it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any

from robust_train.model.errors import ConfigError
from robust_train.readable import first_line

MAIN_MODULE = "__robust_main__"

_EXTRAS = frozenset({"accelerate", "lightning", "transformers"})
"""Packages that an extra of the same name installs."""


@dataclass(frozen=True)
class TrainerRef:
    """A trainer by name, or by value where its name leads nowhere, as in a notebook."""

    path: str  # dotted path of the callable, `package.module.function`
    # the script to load first where the callable was defined in `__main__`
    main_file: str | None = None
    # the callable itself, with what it uses
    pickled: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, trainer: str | Callable[..., Any], *, inline: bool = False
    ) -> TrainerRef:
        """Return the reference for a dotted path or a callable; nothing is imported.

        ``inline``: it runs in this process, so it need not be found by another one.

        Raises:
            ConfigError: there is certainly no such module, or the callable can neither be found by
                name nor pickled.
        """
        if isinstance(trainer, str):
            ref = cls(trainer)
            if not _is_module(ref.parts()[0]):
                raise ref.no_module()
            return ref
        if inline:
            return cls("inline.trainer")
        module, name = (
            str(getattr(trainer, key, "")) for key in ("__module__", "__qualname__")
        )
        if _is_found(trainer, module, name):
            if module != "__main__":
                return cls(f"{module}.{name}")
            if name.isidentifier() and (file := _script_of(trainer)):
                return cls(f"{MAIN_MODULE}.{name}", file)
        return cls(
            f"__main__.{name or type(trainer).__name__}", pickled=_by_value(trainer)
        )

    @property
    def is_ours(self) -> bool:
        """Whether the trainer is a part of robust-train, and so a library."""
        return self.path.startswith("robust_train.")

    def parts(self) -> list[str]:
        """Return the names of the dotted path; raises ConfigError if it is none."""
        parts = self.path.split(".")
        if not all(part.isidentifier() for part in parts) or len(parts) < 2:
            raise ConfigError(
                f"trainer._target_={self.path}: accepted is the dotted path of a function, "
                "package.module.function"
            )
        return parts

    def no_module(self) -> ConfigError:
        """Return the refusal of a path that leads to no module."""
        return ConfigError(
            f"trainer._target_={self.path}: no module {self.path.partition('.')[0]!r} on the "
            "Python path; start the command from its folder or set PYTHONPATH"
        )

    def has_no(
        self, module: str, name: str, did_you_mean: str | None = None
    ) -> ConfigError:
        """Return the refusal of a function that its module lacks."""
        hint = f"; did you mean {did_you_mean!r}?" if did_you_mean else ""
        return ConfigError(
            f"trainer._target_={self.path}: {module} has no {name!r}{hint}"
        )

    def cannot_be_imported(
        self, problem: str, where: str, missing: str | None = None
    ) -> ConfigError:
        """Return the refusal of a module whose import fails; ``missing``: the module it lacks."""
        extra = f'; pip install "robust-train[{missing}]"' if missing in _EXTRAS else ""
        return ConfigError(
            f"trainer._target_={self.path}: cannot be imported: {problem} ({where}){extra}"
        )


class LaunchReached(BaseException):
    """A script without a guard has come to its own ``launch``: all that the trainer uses is there.
    Derived from BaseException, so that the script's ``except Exception`` does not swallow it."""


def end_import_at_launch(trainer: object) -> None:
    """End the import of a script without a guard, in its own attempt, where it calls ``launch``."""
    if getattr(trainer, "__module__", None) == MAIN_MODULE:
        raise LaunchReached(f"{MAIN_MODULE}.{getattr(trainer, '__qualname__', '')}")


def _is_found(trainer: object, module: str, name: str) -> bool:
    """Return whether its name leads to it: not that of an object's method or a decorated copy."""
    try:
        return bool(attrgetter(name)(sys.modules[module]) == trainer)
    except (KeyError, AttributeError):
        return False


def _is_module(name: str) -> bool:
    """Return whether there is a top-level module of this name; it is not imported."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (
        ImportError,
        ValueError,
        AttributeError,
    ):  # a module that was put there by hand
        return PathFinder.find_spec(name) is not None


def _script_of(trainer: Callable[..., Any]) -> str | None:
    """Return the script that defines the trainer; None in a notebook, a REPL, standard input."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not os.path.isfile(file):
        return None
    try:  # beside a script that runs with ``python -i``, functions may come from the prompt
        source = inspect.getfile(inspect.unwrap(trainer))
    except TypeError:
        source = file
    return (
        str(Path(file).resolve())
        if os.path.realpath(source) == os.path.realpath(file)
        else None
    )


def _by_value(trainer: Callable[..., Any]) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(trainer))
    except Exception as error:
        raise ConfigError(
            f"trainer={getattr(trainer, '__qualname__', trainer)!s}: cannot be sent to a separate "
            f"process: {first_line(error)}; make what it uses inside the function, or use "
            "isolation=none"
        ) from None
