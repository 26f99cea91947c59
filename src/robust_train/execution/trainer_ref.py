"""A trainer by name, so that another process can import it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from robust_train.errors import ConfigError
from robust_train.readable import first_line

MAIN_MODULE = "__robust_main__"

_EXTRAS = frozenset({"accelerate", "lightning", "transformers"})
"""Packages that an extra of the same name installs."""


@dataclass(frozen=True)
class TrainerRef:
    """A trainer by name."""

    path: str  # dotted path of the callable, `package.module.function`
    # the script to load first where the callable was defined in `__main__`
    main_file: str | None = None

    @classmethod
    def of(cls, trainer: str | Callable[..., Any]) -> TrainerRef:
        """Return the reference for a dotted path or a callable.

        Raises:
            ConfigError: the callable cannot be found again by name (a lambda, a local function).
        """
        if isinstance(trainer, str):
            return cls(trainer)
        module = getattr(trainer, "__module__", None)
        name = getattr(trainer, "__qualname__", None)
        main_file = getattr(sys.modules.get("__main__"), "__file__", None)
        is_named = bool(module) and bool(name) and "<" not in str(name)
        if not is_named or (module == "__main__" and not _is_file(main_file)):
            raise ConfigError(
                f"trainer={name or trainer!r}: a separate process can only import functions at the "
                "top level of a module; move it there or use isolation=none"
            )
        if module == "__main__":
            return cls(f"{MAIN_MODULE}.{name}", str(Path(str(main_file)).resolve()))
        return cls(f"{module}.{name}")

    @property
    def is_ours(self) -> bool:
        """Whether the trainer is a part of robust-train, and so a library."""
        return self.path.startswith("robust_train.")

    def load(self) -> Callable[..., Any]:
        """Import the trainer.

        Raises:
            ConfigError: it cannot be imported or is not callable; one line that gives the reason.
        """
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
        except Exception as error:
            raise self._failed_import(error) from error

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
        if isinstance(error, SyntaxError):
            where = f"{error.filename}, line {error.lineno}"
        else:
            *_, last = inspect.getinnerframes(error.__traceback__)  # type: ignore[arg-type]
            where = f"{last.filename}, line {last.lineno}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        problem = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, MemoryError):
            problem = "host memory ran out; give the job more, or set a higher limit (ulimit -a)"
        return self.cannot_be_imported(problem, where, missing)


def refuse_without_guard(trainer: object) -> None:
    """Raise ConfigError if ``launch`` is called by the import of a script in its own attempt."""
    if getattr(trainer, "__module__", None) == MAIN_MODULE:
        raise ConfigError(
            "launch() is called wherever the script is imported, also by its own attempts; put "
            'it under: if __name__ == "__main__":'
        )


def _is_file(path: str | None) -> bool:
    """Return whether there is a script to import: a notebook or standard input is none."""
    return path is not None and Path(path).is_file()
