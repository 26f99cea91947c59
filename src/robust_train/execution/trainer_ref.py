"""A trainer by name, so that another process can import it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from robust_train.errors import ConfigError
from robust_train.failures.shortage import no_room_to_import
from robust_train.readable import first_line, named_line

MAIN_MODULE = "__robust_main__"

_EXTRAS = frozenset({"accelerate", "lightning", "transformers"})
"""Packages that an extra of the same name installs."""


class _Reached(BaseException):
    """A script without a guard has come to its own ``launch``: all that the trainer uses is there.
    Derived from BaseException, so that the script's ``except Exception`` does not swallow it."""


@dataclass(frozen=True)
class TrainerRef:
    """A trainer by name, or by value where its name leads nowhere, as in a notebook."""

    path: str  # dotted path of the callable, `package.module.function`
    # the script to load first where the callable was defined in `__main__`
    main_file: str | None = None
    # the callable itself, with what it uses
    pickled: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, trainer: str | Callable[..., Any]) -> TrainerRef:
        """Return the reference for a dotted path or a callable. Raises ConfigError: the callable
        can neither be found by name nor pickled."""
        if isinstance(trainer, str):
            return cls(trainer)
        module, name = (str(getattr(trainer, key, "")) for key in ("__module__", "__qualname__"))
        if _is_found(trainer, module, name):
            if module != "__main__":
                return cls(f"{module}.{name}")
            if name.isidentifier() and (file := _script_of(trainer)):
                return cls(f"{MAIN_MODULE}.{name}", file)
        return cls(f"__main__.{name or type(trainer).__name__}", pickled=_by_value(trainer))

    @property
    def is_ours(self) -> bool:
        """Whether the trainer is a part of robust-train, and so a library."""
        return self.path.startswith("robust_train.")

    def load(self) -> Callable[..., Any]:
        """Import the trainer. Raises ConfigError: it cannot be imported or is not callable; one
        line that gives the reason."""
        if self.pickled is not None:
            return self._unpickled(self.pickled)
        if self.main_file is not None and MAIN_MODULE not in sys.modules:
            self._load_main(self.main_file)
        found, names = self._import_module()
        for name in names:
            if not hasattr(found, name):
                raise self.has_no(found.__name__, name)
            found = getattr(found, name)
        if not callable(found):
            raise ConfigError(f"trainer._target_={self.path}: is not callable")
        return found  # type: ignore[no-any-return]

    def parts(self) -> list[str]:
        """Return the names of the dotted path; raises ConfigError if it is none."""
        parts = self.path.split(".")
        if not all(part.isidentifier() for part in parts) or len(parts) < 2:
            raise ConfigError(
                f"trainer._target_={self.path}: accepted is the dotted path of a function, "
                "package.module.function"
            )
        return parts

    def _import_module(self) -> tuple[Any, list[str]]:
        """Import the longest part of the path that is a module; return it and the other names."""
        parts = self.parts()
        for end in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:end])
            try:
                if name not in sys.modules and importlib.util.find_spec(name) is None:
                    continue
                return importlib.import_module(name), parts[end:]
            except Exception as error:
                missing = error.name if isinstance(error, ModuleNotFoundError) else None
                if missing and (name == missing or name.startswith(missing + ".")):
                    continue
                raise self._failed_import(error) from error
        raise self.no_module()

    def _load_main(self, path: str) -> None:
        """Import a script under another name than ``__main__``, so that its guard holds."""
        spec = importlib.util.spec_from_file_location(MAIN_MODULE, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"trainer: cannot import the script {path}")
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[MAIN_MODULE] = module
        try:
            spec.loader.exec_module(module)
        except _Reached as reached:
            if reached.args[0] != self.path:
                raise ConfigError(
                    "launch() is called a second time wherever the script is imported, also by "
                    'its own attempts; put both calls under: if __name__ == "__main__":'
                ) from None
        except Exception as error:
            raise self._failed_import(error) from error

    def _unpickled(self, pickled: bytes) -> Callable[..., Any]:
        """Build the trainer; what came with it is found in ``__main__``, as where it was."""
        try:
            trainer: Callable[..., Any] = pickle.loads(pickled)
        except Exception as error:
            raise self._failed_import(error) from error
        main = vars(sys.modules["__main__"])
        for name, value in getattr(trainer, "__globals__", {}).items():
            main.setdefault(name, value)  # an object is pickled by the name of its class
        return trainer

    def no_module(self) -> ConfigError:
        """Return the refusal of a path that leads to no module."""
        return ConfigError(
            f"trainer._target_={self.path}: no module {self.path.partition('.')[0]!r} on the "
            "Python path; start the command from its folder or set PYTHONPATH"
        )

    def has_no(self, module: str, name: str, did_you_mean: str | None = None) -> ConfigError:
        """Return the refusal of a function that its module lacks."""
        hint = f"; did you mean {did_you_mean!r}?" if did_you_mean else ""
        return ConfigError(f"trainer._target_={self.path}: {module} has no {name!r}{hint}")

    def cannot_be_imported(
        self, problem: str, where: str, missing: str | None = None
    ) -> ConfigError:
        """Return the refusal of a module whose import fails; ``missing``: the module it lacks."""
        extra = f'; pip install "robust-train[{missing}]"' if missing in _EXTRAS else ""
        return ConfigError(
            f"trainer._target_={self.path}: cannot be imported: {problem} ({where}){extra}"
        )

    def _failed_import(self, error: Exception) -> ConfigError:
        if isinstance(error, ConfigError):
            return error
        no_room = no_room_to_import(self.path, error)
        if no_room is not None and self.is_ours:
            return ConfigError(no_room)
        if isinstance(error, SyntaxError):
            where = f"{error.filename}, line {error.lineno}"
        else:
            *_, (last, line) = traceback.walk_tb(error.__traceback__)
            where = f"{last.f_code.co_filename}, line {line}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        problem = no_room or named_line(error)
        return self.cannot_be_imported(problem, where, missing)


def end_import_at_launch(trainer: object) -> None:
    """End the import of a script without a guard, in its own attempt, where it calls ``launch``."""
    if getattr(trainer, "__module__", None) == MAIN_MODULE:
        raise _Reached(f"{MAIN_MODULE}.{getattr(trainer, '__qualname__', '')}")


def _is_found(trainer: object, module: str, name: str) -> bool:
    """Return whether its name leads to it: not that of an object's method or a decorated copy."""
    try:
        return bool(attrgetter(name)(sys.modules[module]) == trainer)
    except (KeyError, AttributeError):
        return False


def _script_of(trainer: Callable[..., Any]) -> str | None:
    """Return the script that defines the trainer; None in a notebook, a REPL, standard input."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not os.path.isfile(file):
        return None
    try:  # beside a script that runs with ``python -i``, functions may come from the prompt
        source = inspect.getfile(inspect.unwrap(trainer))
    except TypeError:
        source = file
    return str(Path(file).resolve()) if os.path.realpath(source) == os.path.realpath(file) else None


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
