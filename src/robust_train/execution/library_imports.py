"""Which libraries a trainer's module imports, read from its source: nothing of it is executed.

The fork server imports these and never the trainer's own module. Reading it also finds the
mistakes that would only be seen once a GPU is there.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from robust_train.execution.trainer_ref import MAIN_MODULE, TrainerRef

PRELOAD = "preload_modules"
"""A list of more modules to import early: a constant of the trainer's module, or a config key."""

_MOST_MODULES = 1000
_PATH_CHANGERS = frozenset({"sys.path", "sys.meta_path", "sys.path_hooks", "sys.modules"})
_NAME_MAKERS = frozenset(
    {"globals", "exec", "eval", "setattr", "vars", "locals", "__dict__", "modules"}
)


def libraries_of(ref: TrainerRef) -> tuple[str, ...]:
    """Return the libraries that importing the trainer imports, in the order of their import.

    A name that is imported from a library may be a module or an attribute of one.

    Raises:
        ConfigError: there is no such module or function, or its import will certainly fail.
    """
    reader = _Reader(ref)
    reader.read_trainer()
    return tuple(reader.found)


class _Reader:
    """Reads a trainer's module and all of the user's own modules that it imports."""

    def __init__(self, ref: TrainerRef) -> None:
        self.found: dict[str, None] = {}
        self._ref = ref
        self._seen: set[str] = set()
        self._path_is_changed = False

    def read_trainer(self) -> None:
        names = self._ref.parts()
        spec = None
        if self._ref.main_file is not None and names[0] == MAIN_MODULE:
            spec = importlib.util.spec_from_file_location(MAIN_MODULE, self._ref.main_file)
        spec = spec or _spec_of_top(names[0])
        if spec is None:
            raise self._ref.no_module()
        tree = self._own_module(spec, certain=True)
        for depth, name in enumerate(names[1:-1], start=1):
            inner = _spec_inside(spec, name)
            if inner is None:
                names = names[: depth + 1]
                break
            spec, tree = inner, self._own_module(inner, certain=True)
        bound = None if tree is None else _bound_names(tree)
        if tree is not None and bound is not None and names[-1] not in bound:
            kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
            functions = [node.name for node in tree.body if isinstance(node, kinds)]
            close = difflib.get_close_matches(names[-1], functions, n=1)
            raise self._ref.has_no(spec.name, names[-1], close[0] if close else None)

    def _own_module(self, spec: ModuleSpec, *, certain: bool) -> ast.Module | None:
        """Read one module; a library is noted by its name instead, and gives no tree."""
        if not _is_users_own(spec):
            self.found[spec.name] = None
            return None
        is_known = spec.name in self._seen or len(self._seen) >= _MOST_MODULES
        if is_known or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        self._seen.add(spec.name)
        try:
            tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
        except OSError:
            return None
        except (SyntaxError, ValueError) as error:
            if not certain:
                return None
            text, line = (error.msg, error.lineno) if isinstance(error, SyntaxError) else (error, 1)
            problem, where = f"{type(error).__name__}: {text}", f"{spec.origin}, line {line}"
            raise self._ref.cannot_be_imported(problem, where) from None
        self._path_is_changed = self._path_is_changed or any(
            isinstance(node, ast.Attribute)
            and (node.attr == "addsitedir" or ast.unparse(node) in _PATH_CHANGERS)
            for node in ast.walk(tree)
        )
        for node, is_sure in _imports(tree.body, certain):
            self._follow(node, spec, certain=is_sure)
        self.found.update(dict.fromkeys(_preload_list(tree)))
        return tree

    def _follow(
        self, node: ast.Import | ast.ImportFrom, spec: ModuleSpec, *, certain: bool
    ) -> None:
        where = f"{spec.origin}, line {node.lineno}"
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            for name in names:
                self._module(name, (), where, certain=certain)
            return
        module = node.module or ""
        if node.level:
            package = spec.name if spec.submodule_search_locations else spec.parent or ""
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1]
            module = ".".join([*base, *([module] if module else [])])
        if module:
            self._module(module, names, where, certain=certain)

    def _module(self, name: str, inner: Sequence[str], where: str, *, certain: bool) -> None:
        top, *rest = name.split(".")
        if top in sys.stdlib_module_names:
            return
        spec = _spec_of_top(top)
        if spec is None:
            if certain and not self._path_is_changed:
                problem = f"ModuleNotFoundError: No module named {top!r}"
                raise self._ref.cannot_be_imported(problem, where, top)
            return
        if not _is_users_own(spec):
            self.found.update(
                dict.fromkeys([name, *(f"{name}.{one}" for one in inner if one != "*")])
            )
            return
        self._own_module(spec, certain=certain)
        for part in rest:
            found = _spec_inside(spec, part)
            if found is None:
                return
            spec = found
            self._own_module(spec, certain=certain)
        for part in inner:
            found = _spec_inside(spec, part)
            if found is not None:
                self._own_module(found, certain=False)


def _spec_of_top(name: str) -> ModuleSpec | None:
    """Find a top-level module as an import would, without importing it."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a module that was put there by hand
        return PathFinder.find_spec(name)


def _spec_inside(package: ModuleSpec, name: str) -> ModuleSpec | None:
    folders = package.submodule_search_locations
    if folders is None:
        return None
    # by its own name: the full one of a namespace package needs its parent to be imported
    found = PathFinder.find_spec(name, list(folders))
    if found is not None:
        found.name = f"{package.name}.{name}"
        if found.submodule_search_locations is not None:
            found.submodule_search_locations = list(found.submodule_search_locations)
    return found


def _is_users_own(spec: ModuleSpec) -> bool:
    """Return whether a module is neither installed nor Python's own nor ours."""
    top = spec.name.partition(".")[0]
    if top == "robust_train" or top in sys.stdlib_module_names:
        return False
    files = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return any(not str(file).startswith(_LIBRARY_FOLDERS) for file in files)


def _library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(
        f"{path}/" for path in {*paths, *site.getsitepackages(), site.getusersitepackages()}
    )


_LIBRARY_FOLDERS = _library_folders()


def _imports(
    body: Sequence[ast.stmt], certain: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports that run when a module does, and whether they certainly do."""
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
        if isinstance(node, ast.Assign) and PRELOAD in map(ast.unparse, node.targets):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return []
            return [str(name) for name in value] if isinstance(value, (list, tuple)) else []
    return []


def _bound_names(tree: ast.Module) -> set[str] | None:
    """Return every name that the module may bind; None where that cannot be read."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in _NAME_MAKERS:
                return None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(name)
    return None if bound & {"*", "__getattr__"} else bound
