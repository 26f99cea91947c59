"""Which libraries a trainer's module imports, read from its source: nothing of it is executed.

The fork server imports these and never the trainer's own module. Reading it also finds the
mistakes that would only be seen once a GPU is there.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from robust_train.execution.trainer_ref import MAIN_MODULE, TrainerRef

_PRELOAD = "preload_modules"
"""A list of more modules to import early: a constant of the trainer's module, or a config key."""

_KINDS_OF_NAMES = ("name", "asname", "id", "attr")
_IMPORTS = (ast.Import, ast.ImportFrom)
_MOST_MODULES = 1000
_READS_CHECKPOINTING = re.compile(rb"training\W{1,4}gradient_checkpointing\b")
_PATH_CHANGERS = (b"sys.path", b"sys.meta_path", b"sys.modules", b"addsitedir")
_NAME_MAKERS = frozenset({"*", "__getattr__", "__dict__", "globals", "locals", "vars", "modules"})
_NAME_MAKERS |= {"exec", "eval", "setattr"}


def find_trainer(
    trainer: str | Callable[..., Any], inline: bool
) -> tuple[TrainerRef, tuple[str, ...], bool]:
    """Return how to load a trainer, the libraries that its import imports, and whether it heeds
    ``training.gradient_checkpointing``: its source reads that key, or it uses our integration.
    Raises ConfigError: it certainly cannot be loaded."""
    if inline and not isinstance(trainer, str):
        return TrainerRef("inline.trainer"), (), False
    ref = TrainerRef.of(trainer)
    libraries, reads_key = _read(ref)
    return ref, libraries, reads_key or "robust_train.integrations.transformers" in libraries


def libraries_of(ref: TrainerRef) -> tuple[str, ...]:
    """Return the libraries that importing the trainer imports, in the order of their import.

    A name that is imported from a library may be a module or an attribute of one.

    Raises:
        ConfigError: there is no such module or function, or its import will certainly fail.
    """
    return _read(ref)[0]


def _read(ref: TrainerRef) -> tuple[tuple[str, ...], bool]:
    if ref.pickled is not None:
        return ("torch",) if "torch" in sys.modules else (), False
    reader = _Reader(ref)
    reader.read_trainer()
    return tuple(reader.found), reader.reads_checkpointing


class _Reader:
    """Reads a trainer's module and all of the user's own modules that it imports."""

    def __init__(self, ref: TrainerRef) -> None:
        self.found: dict[str, None] = {}
        self.reads_checkpointing = False
        self._ref = ref
        self._seen: set[str] = set()
        self._path_is_changed = False

    def read_trainer(self) -> None:
        names = self._ref.parts()
        spec = self._spec_of_top(names[0])
        if spec is None:
            raise self._ref.no_module()
        modules = [".".join(names[:end]) for end in range(1, len(names))]
        if not _is_users_own(spec):
            self.found.update(dict.fromkeys(modules))
            return
        tree, module, attribute = None, "", ""
        for depth, name in enumerate(modules, start=1):
            if self._own_file(name) is not None:
                module, attribute = name, names[depth]
                tree = self._own_module(name, certain=True, called=attribute)
        if tree is None:
            return
        names_in = _names_in(tree)
        if attribute not in names_in and not names_in & _NAME_MAKERS:
            kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
            functions = [node.name for node in tree.body if isinstance(node, kinds)]
            close = difflib.get_close_matches(attribute, functions, n=1)
            raise self._ref.has_no(module, attribute, close[0] if close else None)

    def _own_module(self, name: str, *, certain: bool, called: str = "") -> ast.Module | None:
        """Read a module of the user's own, once."""
        file = self._own_file(name)
        if file is None or name in self._seen or len(self._seen) >= _MOST_MODULES:
            return None
        self._seen.add(name)
        try:
            source = file.read_bytes()
            tree = ast.parse(source, str(file))
        except OSError:
            return None
        except (SyntaxError, ValueError) as error:
            if not certain:
                return None
            text, line = (error.msg, error.lineno) if isinstance(error, SyntaxError) else (error, 1)
            problem = f"{type(error).__name__}: {text}"
            raise self._ref.cannot_be_imported(problem, f"{file}, line {line}") from None
        self._path_is_changed |= any(word in source for word in _PATH_CHANGERS)
        self.reads_checkpointing |= bool(_READS_CHECKPOINTING.search(source))
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node, is_sure in (*_imports(tree.body, certain), *_first_imports(tree, called)):
            where = f"{file}, line {node.lineno}"
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                self._follow(_absolute(node, package), names, where, certain=is_sure)
            else:
                for one in names:
                    self._follow(one, (), where, certain=is_sure)
        self.found.update(dict.fromkeys(_preload_list(tree)))
        return tree

    def _follow(self, module: str, inner: Sequence[str], where: str, *, certain: bool) -> None:
        """Take in the import of a module, and of names from it."""
        top, *rest = module.split(".")
        if not top or top in sys.stdlib_module_names:
            return
        spec = self._spec_of_top(top)
        if spec is None:
            if certain and not self._path_is_changed:
                problem = f"ModuleNotFoundError: No module named {top!r}"
                raise self._ref.cannot_be_imported(problem, where, top)
        elif _is_users_own(spec):
            for end in range(len(rest) + 1):
                self._own_module(".".join([top, *rest[:end]]), certain=certain)
            for one in inner:
                self._own_module(f"{module}.{one}", certain=False)
        else:
            inside = [f"{module}.{one}" for one in inner if one != "*"]
            self.found.update(dict.fromkeys([module, *inside]))

    def _spec_of_top(self, name: str) -> ModuleSpec | None:
        """Find a top-level module as an import would, without importing it."""
        if name == MAIN_MODULE and self._ref.main_file is not None:
            return importlib.util.spec_from_file_location(name, self._ref.main_file)
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):  # a module that was put there by hand
            return PathFinder.find_spec(name)

    def _own_file(self, name: str) -> Path | None:
        """Return the source of a module of the user's own; None for packages without one."""
        top, *rest = name.split(".")
        spec = self._spec_of_top(top)
        if spec is None or not _is_users_own(spec):
            return None
        files = [Path(spec.origin)] if spec.origin and not rest else []
        for folder in spec.submodule_search_locations or () if rest else ():
            path = Path(folder, *rest)
            files += [path / "__init__.py", path.with_suffix(".py")]
        return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    base = parents[: len(parents) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_users_own(spec: ModuleSpec) -> bool:
    """Return whether a top-level module is neither installed nor Python's own nor ours."""
    if spec.name == "robust_train" or spec.name in sys.stdlib_module_names:
        return False
    files = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return any(not str(file).startswith(_LIBRARY_FOLDERS) for file in files)


def _library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(
        f"{path}/" for path in {*paths, *site.getsitepackages(), site.getusersitepackages()}
    )


_LIBRARY_FOLDERS = _library_folders()


_Found = Iterator[tuple[ast.Import | ast.ImportFrom, bool]]
"""Imports, and whether they certainly run."""


def _first_imports(tree: ast.Module, function: str) -> _Found:
    """Yield the imports in the body of a function of the module, which may not be called."""
    for one in tree.body:
        if isinstance(one, ast.FunctionDef) and one.name == function:
            yield from _imports([node for node in one.body if isinstance(node, _IMPORTS)], False)


def _imports(body: Sequence[ast.stmt], certain: bool) -> _Found:
    """Yield the imports that run when a module does."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, certain
        elif isinstance(node, ast.If):
            if not _never_holds(node.test):
                yield from _imports(node.body, False)
            yield from _imports(node.orelse, False)
        elif isinstance(node, (ast.Try, ast.With, ast.ClassDef)):
            parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            yield from _imports([statement for part in parts for statement in part], False)


def _never_holds(test: ast.expr) -> bool:
    """Return whether it is ``TYPE_CHECKING`` or ``__name__ == "__main__"``."""
    return ast.unparse(test).removeprefix("typing.").startswith(("TYPE_CHECKING", "__name__ =="))


def _preload_list(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and _PRELOAD in map(ast.unparse, node.targets):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return []
            return [str(name) for name in value] if isinstance(value, (list, tuple)) else []
    return []


def _names_in(tree: ast.Module) -> set[str]:
    """Return every name that occurs in the module, among them all that it may bind."""
    found = (getattr(node, kind, "") for node in ast.walk(tree) for kind in _KINDS_OF_NAMES)
    return {name for name in found if isinstance(name, str)}
