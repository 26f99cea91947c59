"""Finds effects of a script that its attempts lack, because they do not run its ``__main__`` guard.

An attempt imports the script. It runs none of it if the trainer is imported from elsewhere or was
sent by value. The command reads the source and warns before the job starts.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from robust_train.config.trainers import MainModule, TrainerRef

_SETTINGS = frozenset(
    (
        "enable_full_determinism",
        "set_default_device",
        "set_default_dtype",
        "set_float32_matmul_precision",
        "use_deterministic_algorithms",
    )
)
"""Functions that change a whole process's results, in addition to those with "seed" in their name.
"""

_SWITCHES = "torch.backends."
"""The prefix of torch's attributes that do the same."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class GuardedEffects:
    """Effects of a script that do not happen in attempts, although its trainer depends on them.

    Attributes:
        calls: dotted names of functions that seed or configure a whole process.
        names: variables of the script, and switches of torch, that get another value.
    """

    calls: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def in_words(
        self, script: str, why: str = ' under if __name__ == "__main__":, which does not run'
    ) -> str | None:
        """Return the effects in one line, with the reason, or None if there are none."""
        effects = []
        if self.calls:
            effects.append("calls " + ", ".join(f"{call}()" for call in self.calls))
        if self.names:
            effects.append("sets " + ", ".join(self.names))
        if not effects:
            return None
        return (
            f"{script} {' and '.join(effects)}{why} "
            "in attempts; do so in the trainer, or give it the values in its config"
        )


def effects_lost_in_attempts(trainer: TrainerRef) -> str | None:
    """Return in one line which of a script's effects are missing in its attempts, None if none are
    known."""
    main = trainer.main
    if main is None:
        main = MainModule.of_this_process()
    if main is None or trainer.is_ours:
        return None
    script = Path(main.file)
    module, _, name = trainer.path.rpartition(".")
    with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError):
        tree = ast.parse(script.read_bytes())
        if trainer.pickled:
            # The trainer takes the values of its variables along.
            why = f", but the trainer is sent by value: {script.name} does not run"
            return effects_beside_value(tree, name).in_words(script.name, why)
        if trainer.main is not None:
            return effects_under_guard(tree, name).in_words(script.name)
        source = _source_of(module)
        if source is not None and not source.samefile(script):
            effects = effects_beside_module(tree, ast.parse(source.read_bytes()))
            why = f", but the trainer is imported from {module}: {script.name} does not run"
            return effects.in_words(script.name, why)
    return None


def _source_of(module: str) -> Path | None:
    """Return the file of a module without importing it, or None if it is unknown."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        return Path(loaded)
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    if not below:
        return Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*below)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


def effects_under_guard(script: ast.Module, trainer: str) -> GuardedEffects:
    """Return the effects of a script's guard that its function ``trainer`` depends on."""
    defined: dict[str, Definition] = {}
    guarded: list[ast.stmt] = []
    always: list[ast.stmt] = []
    for node in script.body:
        if isinstance(node, _DEFINITIONS):
            defined[node.name] = node
        elif isinstance(node, ast.If) and _is_guard(node.test):
            guarded += node.body
        else:
            always.append(node)
    in_attempts = _reached([defined[trainer]] if trainer in defined else [], defined)
    only_guarded = [item for item in _reached(guarded, defined) if item not in in_attempts]
    imported = _imported_in(script)
    effects = set(_effects_in([*guarded, *only_guarded], imported))
    has_like = {_kind_of(item) for item in _effects_in([*always, *in_attempts], imported)}
    lost = sorted(item for item in effects if _kind_of(item) not in has_like)
    anew = _variables_set_in(guarded)
    for function in only_guarded:
        anew |= _variables_set_in([function]) - _locals_of(function)
    read = {name for item in in_attempts for name in _read_in(item) if name not in _locals_of(item)}
    # A variable that is only set under the guard ends attempts with a NameError.
    has_value = _variables_bound_in(always) | {item.name for item in defined.values()}
    variables = sorted(anew & read & has_value)
    switches = [item for item in lost if item.startswith(_SWITCHES)]
    return GuardedEffects(
        tuple(item for item in lost if item not in switches), tuple(variables + switches)
    )


def effects_beside_module(script: ast.Module, module: ast.Module) -> GuardedEffects:
    """Return the effects of a script whose trainer is in another module, except those that this
    module has."""
    return _effects_without(script, _effects_in([module], _imported_in(module)))


def effects_beside_value(script: ast.Module, trainer: str) -> GuardedEffects:
    """Return the effects of a script that sends its trainer, a function, by value. Of a trainer
    that is an object the code is unknown, and so are its effects."""
    nodes = [node for node in ast.walk(script) if _is_named(node, trainer)]
    if not nodes:
        return GuardedEffects()
    in_attempts = [*nodes, *_reached(nodes, _defined_in(script))]
    return _effects_without(script, _effects_in(in_attempts, _imported_in(script)))


def _effects_without(script: ast.Module, in_attempts: Iterable[str]) -> GuardedEffects:
    """Return the script's effects without an equivalent in its attempts. Functions that the script
    does not call have no effects."""
    statements = [node for node in script.body if not isinstance(node, _DEFINITIONS)]
    done = [*statements, *_reached(statements, _defined_in(script))]
    has_like = {_kind_of(item) for item in in_attempts}
    effects = sorted(set(_effects_in(done, _imported_in(script))))
    lost = [item for item in effects if _kind_of(item) not in has_like]
    switches = tuple(item for item in lost if item.startswith(_SWITCHES))
    return GuardedEffects(tuple(item for item in lost if item not in switches), switches)


def _is_named(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Lambda):
        return name == "<lambda>"
    return isinstance(node, _DEFINITIONS) and node.name == name


def _defined_in(script: ast.Module) -> dict[str, Definition]:
    return {node.name: node for node in script.body if isinstance(node, _DEFINITIONS)}


def _is_guard(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _reached(nodes: Sequence[ast.AST], defined: Mapping[str, Definition]) -> list[Definition]:
    """Return the script's functions and classes that some nodes contain or name, directly or
    through others."""
    reached = [node for node in nodes if isinstance(node, _DEFINITIONS)]
    waiting = list(nodes)
    for node in waiting:
        for name in _read_in(node):
            if name in defined and defined[name] not in reached:
                reached.append(defined[name])
                waiting.append(defined[name])
    return reached


def _read_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            yield inner.id


def _imported_in(script: ast.Module) -> set[str]:
    """Return the names that imports bind anywhere in a script."""
    names: set[str] = set()
    for node in ast.walk(script):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names


def _effects_in(nodes: Sequence[ast.AST], imported: set[str]) -> Iterator[str]:
    """Yield the dotted names of a library's functions that are called to set something, and of
    torch's switches."""
    for node in chain.from_iterable(map(ast.walk, nodes)):
        name = ""
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = ast.unparse(node)
        is_imported = name.partition(".")[0] in imported and name.replace(".", "").isidentifier()
        if is_imported and _kind_of(name):
            yield name


def _kind_of(name: str) -> str:
    """Return the setting that a function or a switch changes, "" if none. All seeds are one
    setting."""
    last = name.rpartition(".")[2]
    if name.startswith(_SWITCHES):
        return name
    if "seed" in last:
        return "seed"
    return last if last in _SETTINGS else ""


def _variables_bound_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the variables to which nodes give a value."""
    walked = chain.from_iterable(map(ast.walk, nodes))
    names = (node for node in walked if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _variables_set_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Return these and the variables whose attributes or items nodes set."""
    names = _variables_bound_in(nodes)
    for node in chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            target: ast.expr = node
            while isinstance(target, (ast.Attribute, ast.Subscript)):
                target = target.value
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def _locals_of(definition: Definition) -> set[str]:
    """Return the local names of a function, or of a class's methods."""
    names = _variables_bound_in([definition])
    names |= {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    for node in ast.walk(definition):
        if isinstance(node, ast.Global):
            names -= set(node.names)
    return names
