"""Imports a trainer by its reference, and learns which features it supports.

The runner uses it in the process that trains.
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
from typing import Any, ClassVar

from omegaconf import AnyNode, Container, DictConfig

from robust_train.compat import importing_main
from robust_train.config.trainers import (
    MAIN_MODULE,
    VARIADIC,
    LaunchReached,
    MainModule,
    TrainerRef,
    own_signature,
    signature_of,
)
from robust_train.failures.shortage import explain_failed_import
from robust_train.model.errors import ConfigError, UserError
from robust_train.readable import meant, named_line

Trainer = Callable[..., Any]

CHECKPOINTING = "gradient_checkpointing"
WORKERS = "num_workers"
_READS = {CHECKPOINTING: CHECKPOINTING, WORKERS: "workers"}
"""The features that a trainer may declare in ``supports``, each with the end of a key that shows
it."""


_EXTRAS = frozenset({"accelerate", "lightning", "transformers"})
"""Packages that an extra with the same name installs."""


def load(ref: TrainerRef) -> Trainer:
    """Import the trainer.

    Raises:
        ConfigError: it cannot be imported or is not callable. The message is one line with the
            reason.
    """
    if ref.pickled:
        return _unpickled(ref, ref.pickled)
    if ref.main is not None:
        _load_main(ref, ref.main)
    target, names = _import_module(ref)
    for name in names:
        if not hasattr(target, name):
            functions = [key for key, value in vars(target).items() if callable(value)]
            close = difflib.get_close_matches(name, functions, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ref.refused(f"{target.__name__} has no {name!r}{hint}")
        target = getattr(target, name)
    if not callable(target):
        raise ref.refused("is not callable")
    return target  # type: ignore[no-any-return]


def _import_module(ref: TrainerRef) -> tuple[Any, list[str]]:
    """Import the longest part of the path that is a module. Returns it and the remaining names."""
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


def _load_main(ref: TrainerRef, main: MainModule) -> None:
    """Import a script as ``__main__``, but under another name until the import is done, so that its
    guard holds. A spawned process of :mod:`multiprocessing` does the same."""
    module = ModuleType(MAIN_MODULE)
    del sys.modules[MAIN_MODULE]
    # The module exists if it comes from a copy.
    copied = importlib.util.find_spec(MAIN_MODULE)
    loader: Any = SourceFileLoader(MAIN_MODULE, main.file)
    if copied is not None:
        loader = copied.loader
    sys.modules["__main__"] = sys.modules[MAIN_MODULE] = module
    try:
        _name_main(module, main)
        module.__loader__ = loader
        with importing_main():
            loader.exec_module(module)
    except LaunchReached as reached:
        if reached.trainer != ref.path.replace(MAIN_MODULE, "__main__", 1):
            raise ConfigError(
                "launch() is called a second time wherever the script is imported, also by "
                'its own attempts; put both calls under: if __name__ == "__main__":'
            ) from None
    except Exception as error:
        raise _failed_import(ref, error) from error
    module.__name__ = "__main__"
    _rename_definitions(module)


def _name_main(module: ModuleType, main: MainModule) -> None:
    """Set the names by which :mod:`multiprocessing` finds the script, and the script finds its
    package."""
    module.__file__ = main.file
    if main.name:
        module.__spec__ = importlib.util.find_spec(main.name)
        if module.__spec__ is not None:
            module.__package__ = module.__spec__.parent


def _rename_definitions(owner: ModuleType | type) -> None:
    """Assign functions and classes of a script to ``__main__``, as if it ran by itself.

    A library that finds them under another name assumes that they belong to a package. It then
    pickles them by name for a process that cannot import them, and caches results by the name
    alone.
    """
    for value in list(vars(owner).values()):
        # For a static method or a class method this is the function.
        defined = getattr(value, "__func__", value)
        is_definition = isinstance(defined, (FunctionType, type))
        if is_definition and defined.__module__ == MAIN_MODULE:
            with contextlib.suppress(Exception):  # a metaclass may refuse
                defined.__module__ = "__main__"
            if isinstance(defined, type):
                _rename_definitions(defined)


def _unpickled(ref: TrainerRef, pickled: bytes) -> Trainer:
    """Build the trainer, and put the names that it uses into ``__main__``, as in the program."""
    module = sys.modules["__main__"]
    try:
        if ref.main is not None:
            _name_main(module, ref.main)
        trainer: Trainer = pickle.loads(pickled)
    except Exception as error:
        raise _failed_import(ref, error) from error
    for names in _names_used_by(trainer):
        for name, value in names.items():
            # An object is pickled by the name of its class.
            vars(module).setdefault(name, value)
    return trainer


def _names_used_by(trainer: object) -> Iterator[dict[str, Any]]:
    """Yield the names of ``__main__`` that the parts of a callable use: a partial, a method, an
    object with ``__call__`` and a decorated function consist of other callables."""
    parts: list[Any] = [trainer]
    seen = set[int]()
    for part in parts:
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, FunctionType):
            if part.__globals__.get("__name__") == "__main__":
                yield part.__globals__
            for cell in part.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    parts.append(cell.cell_contents)
        elif isinstance(part, MethodType):
            parts += [part.__func__, part.__self__]
        elif isinstance(part, partial):
            parts += [part.func, *part.args, *part.keywords.values()]
        else:
            kind = part if isinstance(part, type) else type(part)
            if kind.__module__ == "__main__":
                yield {kind.__qualname__: kind}
            parts += filter(_is_function, vars(kind).values())


def _is_function(value: object) -> bool:
    return isinstance(value, FunctionType)


def _failed_import(ref: TrainerRef, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    no_room = explain_failed_import(ref.path, error)
    if no_room is not None and ref.is_ours:
        return ConfigError(no_room)
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    else:
        *_, (last, line) = traceback.walk_tb(error.__traceback__)
        where = f"{last.f_code.co_filename}, line {line}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    extra = f'; pip install "robust-train[{missing}]"' if missing in _EXTRAS else ""
    problem = no_room if no_room else named_line(error)
    return ref.refused(f"cannot be imported: {problem} ({where}){extra}")


def call_with_run(function: Callable[..., Any], cfg: Any, run: object) -> Any:
    """Return ``function(cfg)``, or ``function(cfg, run)`` if it takes a second argument.

    A second parameter counts if it is called ``run`` or has no default value.
    """
    try:
        signatures = [own_signature(function), signature_of(function)]
    except (TypeError, ValueError):
        return function(cfg)
    wanted = signatures[-1]
    named = wanted.parameters.get("run")
    is_named = named is not None and named.kind not in VARIADIC
    if is_named and all(_takes(signature, cfg, run=run) for signature in signatures):
        return function(cfg, run=run)
    if all(_takes(signature, cfg, run) for signature in signatures):
        is_second = wanted.bind(cfg, run).arguments.get("run") is run
        if is_second or not _takes(wanted, cfg):
            return function(cfg, run)
    return function(cfg)


def _takes(signature: inspect.Signature, *arguments: object, **named: object) -> bool:
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def support_of(trainer: object, has_read: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return a predicate: whether the trainer supports a feature.

    It goes by an attribute, ``train.supports = {"gradient_checkpointing"}``, else by the keys that
    the trainer ``has_read``.

    Raises:
        UserError: the trainer declares a feature that does not exist.
    """
    declared = getattr(trainer, "supports", None)
    if not isinstance(declared, (set, frozenset, list, tuple)):
        return lambda feature: has_read(_READS[feature])
    for name in declared:
        if name not in _READS:
            raise UserError(f"supports={name!r}: no such feature; {meant(str(name), _READS)}")
    return frozenset(declared).__contains__


class NotedValue(AnyNode):
    """A config value that notes its name when it is read in this process."""

    names: ClassVar[set[str]] = set()

    def _value(self) -> Any:
        NotedValue.names.add(str(self._key()))
        return super()._value()

    def __deepcopy__(self, memo: dict[int, Any]) -> NotedValue:
        copied = NotedValue()
        self._deepcopy_impl(copied, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled like a plain value: a checkpoint has to be readable without this class,
        too."""
        return AnyNode, (), self.__getstate__()


def note_reads(
    cfg: DictConfig, batch_size: object, accumulation: object = None
) -> Callable[[str], bool]:
    """Return a predicate: whether a key whose name has this part has been read since.

    It covers ``…batch_size`` and ``…accum…`` with these values (references to them are resolved by
    now), ``…workers``, ``gradient_checkpointing`` and ``training.lr``.
    """
    parts: list[Any] = [cfg]
    unknown = set[str]()  # a list has a figure for each of several loaders
    for part in parts:
        is_dict = isinstance(part._content, dict)
        for name, node in part._content.items() if is_dict else enumerate(part._content or ()):
            is_workers = str(name).endswith("workers")
            if isinstance(node, Container):
                parts += [] if node._is_none() or node._is_missing() else [node]
                unknown |= {str(name)} if is_workers else set()
            elif (
                is_workers
                or name == CHECKPOINTING
                or (name == "lr" and part._key() == "training")
                or (str(name).endswith("batch_size") and node == batch_size)
                or ("accum" in str(name) and node == accumulation)
            ):
                part._content[name] = NotedValue(node._value(), key=name, parent=part)
    NotedValue.names.clear()
    NotedValue.names.update(unknown)
    return lambda part: any(part in name for name in NotedValue.names)
