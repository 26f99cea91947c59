"""A trainer is imported by its reference, in the process that runs it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from robust_train.config.trainer_ref import MAIN_MODULE, LaunchReached, TrainerRef
from robust_train.failures.shortage import no_room_to_import
from robust_train.model.errors import ConfigError
from robust_train.readable import named_line


def load(ref: TrainerRef) -> Callable[..., Any]:
    """Import the trainer. Raises ConfigError: it cannot be imported or is not callable; one
    line that gives the reason."""
    if ref.pickled is not None:
        return _unpickled(ref, ref.pickled)
    if ref.main_file is not None and MAIN_MODULE not in sys.modules:
        _load_main(ref, ref.main_file)
    found, names = _import_module(ref)
    for name in names:
        if not hasattr(found, name):
            functions = [key for key, value in vars(found).items() if callable(value)]
            close = difflib.get_close_matches(name, functions, n=1)
            raise ref.has_no(found.__name__, name, close[0] if close else None)
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"trainer._target_={ref.path}: is not callable")
    return found  # type: ignore[no-any-return]


def _import_module(ref: TrainerRef) -> tuple[Any, list[str]]:
    """Import the longest part of the path that is a module; return it and the other names."""
    parts = ref.parts()
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
            raise _failed_import(ref, error) from error
    raise ref.no_module()


def _load_main(ref: TrainerRef, path: str) -> None:
    """Import a script under another name than ``__main__``, so that its guard holds."""
    spec = importlib.util.spec_from_file_location(MAIN_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"trainer: cannot import the script {path}")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[MAIN_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except LaunchReached as reached:
        if reached.args[0] != ref.path:
            raise ConfigError(
                "launch() is called a second time wherever the script is imported, also by "
                'its own attempts; put both calls under: if __name__ == "__main__":'
            ) from None
    except Exception as error:
        raise _failed_import(ref, error) from error


def _unpickled(ref: TrainerRef, pickled: bytes) -> Callable[..., Any]:
    """Build the trainer; what came with it is found in ``__main__``, as where it was."""
    try:
        trainer: Callable[..., Any] = pickle.loads(pickled)
    except Exception as error:
        raise _failed_import(ref, error) from error
    main = vars(sys.modules["__main__"])
    for name, value in getattr(trainer, "__globals__", {}).items():
        main.setdefault(name, value)  # an object is pickled by the name of its class
    return trainer


def _failed_import(ref: TrainerRef, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    no_room = no_room_to_import(ref.path, error)
    if no_room is not None and ref.is_ours:
        return ConfigError(no_room)
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    else:
        *_, (last, line) = traceback.walk_tb(error.__traceback__)
        where = f"{last.f_code.co_filename}, line {line}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    problem = no_room or named_line(error)
    return ref.cannot_be_imported(problem, where, missing)
