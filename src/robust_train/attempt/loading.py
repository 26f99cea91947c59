"""Imports a trainer by its reference, and calls it.

In the process that trains, :mod:`.interpreter` and ``launcher.inline`` use :func:`load`, and the
runner uses :func:`call_with_run`. A trainer is a function in a module, a function in the user's
script, which is imported under a name other than ``__main__``, or a pickled object.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from types import FunctionType, MethodType, ModuleType
from typing import Any

from robust_train.compat import importing_main
from robust_train.config.signatures import VARIADIC, own_signature, signature_of
from robust_train.config.trainers import MAIN_MODULE, LaunchReached, MainModule, TrainerRef
from robust_train.failures.shortage import explain_failed_import
from robust_train.model.errors import ConfigError
from robust_train.readable import named_line

Trainer = Callable[..., Any]

_EXTRAS = frozenset({"accelerate", "lightning", "transformers"})
"""Packages that this package's extra of the same name installs."""


def load(ref: TrainerRef) -> Trainer:
    """Import the trainer.

    Raises:
        ConfigError: it cannot be imported or is not callable. The message is one line.
    """
    if ref.pickled:
        return _unpickle(ref, ref.pickled)
    if ref.main is not None:
        _load_main(ref, ref.main)
    target, names = _import_module(ref)
    for name in names:
        if not hasattr(target, name):
            functions = [key for key, value in vars(target).items() if callable(value)]
            hint = ""
            close = difflib.get_close_matches(name, functions, n=1)
            if close:
                hint = f"; did you mean {close[0]!r}?"
            raise ref.refused(f"{target.__name__} has no {name!r}{hint}")
        target = getattr(target, name)
    if not callable(target):
        raise ref.refused("is not callable")
    return target  # type: ignore[no-any-return]


def _import_module(ref: TrainerRef) -> tuple[Any, list[str]]:
    """Import the longest part of the path that is a module. Return it with the remaining names."""
    parts = ref.parts()
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            if name not in sys.modules and importlib.util.find_spec(name) is None:
                continue
            return importlib.import_module(name), parts[end:]
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            # This prefix is not a module, so a shorter prefix is tried. If a module of another name
            # is missing, the error is inside the trainer's module.
            if missing and (name == missing or name.startswith(missing + ".")):
                continue
            raise _import_error(ref, error) from error
    raise ref.no_module()


def _load_main(ref: TrainerRef, main: MainModule) -> None:
    """Import a script as ``__main__``.

    During the import it has another name, so that ``if __name__ == "__main__":`` is false. A
    spawned process of :mod:`multiprocessing` does the same.
    """
    module = ModuleType(MAIN_MODULE)
    del sys.modules[MAIN_MODULE]
    loader = SourceFileLoader(MAIN_MODULE, main.file)
    sys.modules["__main__"] = sys.modules[MAIN_MODULE] = module
    try:
        _name_main(module, main)
        module.__loader__ = loader
        with importing_main():
            loader.exec_module(module)
    except LaunchReached as reached:
        if reached.trainer != ref.path.replace(MAIN_MODULE, "__main__", 1):
            raise ConfigError(
                "launch() is called a second time when the script is imported, which its attempts "
                'do; put both calls under: if __name__ == "__main__":'
            ) from None
    except Exception as error:
        raise _import_error(ref, error) from error
    module.__name__ = "__main__"
    _rename_definitions(module)


def _name_main(module: ModuleType, main: MainModule) -> None:
    """Set the attributes by which :mod:`multiprocessing` finds the script, and by which the script
    finds its package."""
    module.__file__ = main.file
    if main.name:
        module.__spec__ = importlib.util.find_spec(main.name)
        if module.__spec__ is not None:
            module.__package__ = module.__spec__.parent


def _rename_definitions(owner: ModuleType | type) -> None:
    """Set the module of a script's functions and classes to ``__main__``, as if the script ran by
    itself.

    With another module, a library assumes that they belong to a package. It then pickles them by
    name for a process that cannot import them, and caches results by the name alone.
    """
    for value in list(vars(owner).values()):
        # In a static method or a class method, the function is in ``__func__``.
        defined = getattr(value, "__func__", value)
        is_definition = isinstance(defined, (FunctionType, type))
        if is_definition and defined.__module__ == MAIN_MODULE:
            with contextlib.suppress(Exception):  # A metaclass may refuse.
                defined.__module__ = "__main__"
            if isinstance(defined, type):
                _rename_definitions(defined)


def _unpickle(ref: TrainerRef, pickled: bytes) -> Trainer:
    """Build the trainer, and put the names that it uses into ``__main__``, as in the user's
    program."""
    module = sys.modules["__main__"]
    try:
        if ref.main is not None:
            _name_main(module, ref.main)
        trainer: Trainer = pickle.loads(pickled)
    except Exception as error:
        raise _import_error(ref, error) from error
    for names in _names_used_by(trainer):
        for name, value in names.items():
            # A class is pickled by its name in this module.
            vars(module).setdefault(name, value)
    return trainer


def _names_used_by(trainer: object) -> Iterator[dict[str, Any]]:
    """Yield the names of ``__main__`` that a callable uses, as dictionaries. The callables inside a
    partial, a method, an object with ``__call__`` or a decorated function are included."""
    to_do: list[Any] = [trainer]
    seen = set[int]()
    while to_do:
        part = to_do.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, FunctionType):
            if part.__globals__.get("__name__") == "__main__":
                yield part.__globals__
            for cell in part.__closure__ or ():
                with contextlib.suppress(ValueError):  # The cell is empty.
                    to_do.append(cell.cell_contents)
        elif isinstance(part, MethodType):
            to_do += [part.__func__, part.__self__]
        elif isinstance(part, partial):
            to_do += [part.func, *part.args, *part.keywords.values()]
        else:
            kind = part if isinstance(part, type) else type(part)
            if kind.__module__ == "__main__":
                yield {kind.__qualname__: kind}
            to_do += [value for value in vars(kind).values() if isinstance(value, FunctionType)]


def _import_error(ref: TrainerRef, error: Exception) -> ConfigError:
    """Return a one-line error for an exception that was raised while importing the trainer."""
    if isinstance(error, ConfigError):
        return error
    no_room = explain_failed_import(ref.path, error)
    if no_room is not None and ref.is_ours:
        return ConfigError(no_room)
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    else:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = f"{frame.f_code.co_filename}, line {line}"
    hint = ""
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        hint = f'; pip install "robust-train[{error.name}]"'
    problem = no_room if no_room else named_line(error)
    return ref.refused(f"cannot be imported: {problem} ({place}){hint}")


def call_with_run(function: Callable[..., Any], cfg: Any, run: object) -> Any:
    """Return ``function(cfg)``, or ``function(cfg, run)`` if it takes a second argument.

    A second parameter counts if it is called ``run`` or has no default value.
    """
    try:
        # A decorated function must accept the arguments, and so must its wrapper.
        signatures = [own_signature(function), signature_of(function)]
    except (TypeError, ValueError):
        return function(cfg)
    wanted = signatures[-1]
    named = wanted.parameters.get("run")
    is_named = named is not None and named.kind not in VARIADIC
    if is_named and all(_accepts(signature, cfg, run=run) for signature in signatures):
        return function(cfg, run=run)
    if all(_accepts(signature, cfg, run) for signature in signatures):
        is_second = wanted.bind(cfg, run).arguments.get("run") is run
        if is_second or not _accepts(wanted, cfg):
            return function(cfg, run)
    return function(cfg)


def _accepts(signature: inspect.Signature, *arguments: object, **named: object) -> bool:
    """Return whether a function with this signature can be called with these arguments."""
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True
