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

    Raises:
        ConfigError: there is no such module or function, or its import will certainly fail.
    """
    return tuple(_Reader(ref).read())


class _Reader:
    """Reads a trainer's module and all of the user's own modules that it imports."""

    def __init__(self, ref: TrainerRef) -> None:
        self._ref = ref
        self._found: dict[str, None] = {}
        self._seen: set[str] = set()
        self._path_is_changed = False

    def read(self) -> Sequence[str]:
        names = self._ref.parts()
        spec = None
        if self._ref.main_file is not None and names[0] == MAIN_MODULE:
            spec = importlib.util.spec_from_file_location(MAIN_MODULE, self._ref.main_file)
        spec = spec or _spec_of_top(names[0])
        if spec is None:
            raise self._ref.no_module()
        depth = 1
        tree = self._own_module(spec, certain=True)
        while depth < len(names) - 1:
            inner = _spec_inside(spec, names[depth])
            if inner is None:
                break
            spec, depth = inner, depth + 1
            tree = self._own_module(spec, certain=True)
        if tree is not None:
            self._check_name(spec.name, tree, names[depth])
        return [*self._found]

    def _own_module(self, spec: ModuleSpec, *, certain: bool) -> ast.Module | None:
        """Read one module; a library is noted by its name instead, and gives no tree."""
        if not _is_users_own(spec):
            self._found[spec.name] = None
            return None
        is_known = spec.name in self._seen or len(self._seen) >= _MOST_MODULES
        if is_known or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        self._seen.add(spec.name)
        path = Path(spec.origin)
        try:
            tree = ast.parse(path.read_bytes(), spec.origin)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            if not certain:
                return None
            name = type(error).__name__
            text = error.msg if isinstance(error, SyntaxError) else str(error)
            raise self._ref.cannot_be_imported(f"{name}: {text}", f"{path}, line {line}") from None
        except OSError:
            return None
        self._path_is_changed = self._path_is_changed or _changes_imports(tree)
        for node, is_sure in _imports(tree.body, certain):
            self._follow(node, spec, certain=is_sure)
        self._found.update(dict.fromkeys(_constant_list(tree)))
        return tree

    def _follow(
        self, node: ast.Import | ast.ImportFrom, spec: ModuleSpec, *, certain: bool
    ) -> None:
        where = f"{spec.origin}, line {node.lineno}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._module(alias.name, (), where, certain=certain)
            return
        name = node.module or ""
        if node.level:
            package = spec.name if spec.submodule_search_locations else spec.parent or ""
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            name = ".".join([*base, *([name] if name else [])])
        if name:
            self._module(name, [alias.name for alias in node.names], where, certain=certain)

    def _module(self, name: str, inner: Sequence[str], where: str, *, certain: bool) -> None:
        top, *rest = name.split(".")
        if top == "__future__" or top in sys.builtin_module_names:
            return
        spec = _spec_of_top(top)
        if spec is None:
            if certain and not self._path_is_changed:
                problem = f"ModuleNotFoundError: No module named {top!r}"
                raise self._ref.cannot_be_imported(problem, where, top)
            return
        if not _is_users_own(spec):
            if top not in sys.stdlib_module_names:
                self._found[name] = None
                # a submodule, or an attribute: the server finds out
                self._found.update(dict.fromkeys(f"{name}:{one}" for one in inner if one != "*"))
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

    def _check_name(self, module: str, tree: ast.Module, name: str) -> None:
        bound = _bound_names(tree)
        if bound is not None and name not in bound:
            close = difflib.get_close_matches(name, _functions(tree), n=1)
            raise self._ref.has_no(module, name, close[0] if close else None)


def _spec_of_top(name: str) -> ModuleSpec | None:
    """Find a top-level module as an import would, without importing it."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a module that was put there by hand
        return PathFinder.find_spec(name)


def _spec_inside(package: ModuleSpec, name: str) -> ModuleSpec | None:
    places = package.submodule_search_locations
    if places is None:
        return None
    # by its own name: the full one of a namespace package needs its parent to be imported
    found = PathFinder.find_spec(name, list(places))
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
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return any(not str(place).startswith(_LIBRARY_FOLDERS) for place in places)


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
            if not _is_type_checking(node.test):
                yield from _imports(node.body, False)
            yield from _imports(node.orelse, False)
        elif isinstance(node, (ast.Try, ast.TryStar)):
            yield from _imports([*node.body, *node.orelse], False)
            yield from _imports(node.finalbody, False)
        elif isinstance(node, (ast.With, ast.ClassDef)):
            yield from _imports(node.body, False)


def _is_type_checking(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare):  # if __name__ == "__main__"
        return isinstance(test.left, ast.Name) and test.left.id == "__name__"
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _constant_list(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == PRELOAD for target in node.targets
        ):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return []
            return [str(name) for name in value] if isinstance(value, (list, tuple)) else []
    return []


def _changes_imports(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and (node.attr == "addsitedir" or ast.unparse(node) in _PATH_CHANGERS)
        for node in ast.walk(tree)
    )


def _mentions(tree: ast.Module, names: frozenset[str]) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.Name) and node.id in names)
        for node in ast.walk(tree)
    )


def _functions(tree: ast.Module) -> list[str]:
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds)]


def _bound_names(tree: ast.Module) -> set[str] | None:
    """Return every name that the module may bind; None where that cannot be read."""
    if _mentions(tree, _NAME_MAKERS):
        return None
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return None
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            bound.add(node.name)
    return None if "__getattr__" in bound else bound
