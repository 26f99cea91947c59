"""Warns if a script seeds or configures something that its attempts will miss.

For example, ``torch.manual_seed(0)`` under ``if __name__ == "__main__":`` runs in the launcher, but
not in an attempt, which only imports the script. An attempt does not even import the script if the
trainer is in another module or was sent by value. The launcher parses the script's source, without
running it, before the job starts.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from robust_train.config.trainers import MainModule, TrainerRef

# Functions that change a whole process's results. Functions with "seed" in their name do so too.
_SETTINGS = frozenset(
    (
        "enable_full_determinism",
        "set_default_device",
        "set_default_dtype",
        "set_float32_matmul_precision",
        "use_deterministic_algorithms",
    )
)

# The prefix of torch's attributes that change a whole process's results.
_SWITCHES = "torch.backends."

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class GuardedEffects:
    """Effects of a script that do not happen in attempts, although its trainer depends on them.

    Attributes:
        calls: dotted names of functions that seed or configure a whole process.
        names: variables of the script, and switches of torch, that get a new value.
    """

    calls: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def in_words(
        self, script: str, why: str = ' under if __name__ == "__main__":, which does not run'
    ) -> str | None:
        """Return the effects in one line, with the reason ``why``, or None if there are none."""
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


def describe_lost_effects(trainer: TrainerRef) -> str | None:
    """Return a line with the effects of this process's script that are missing in its attempts, or
    None if none are found."""
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
            # The values of the script's variables are sent with the trainer.
            why = f", but the trainer is sent by value: {script.name} does not run"
            return find_effects_lost_by_value(tree, name).in_words(script.name, why)
        if trainer.main is not None:
            return find_effects_under_guard(tree, name).in_words(script.name)
        source = _find_source(module)
        if source is not None and not source.samefile(script):
            effects = find_effects_lacking_in_module(tree, ast.parse(source.read_bytes()))
            why = f", but the trainer is imported from {module}: {script.name} does not run"
            return effects.in_words(script.name, why)
    return None


def _find_source(module: str) -> Path | None:
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
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


def find_effects_under_guard(script: ast.Module, trainer: str) -> GuardedEffects:
    """Return the effects of a script's ``__main__`` guard that its function ``trainer`` depends
    on."""
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
    in_attempts = _reach([defined[trainer]] if trainer in defined else [], defined)
    only_guarded = [item for item in _reach(guarded, defined) if item not in in_attempts]
    imported = _find_imports(script)
    effects = set(_find_effects([*guarded, *only_guarded], imported))
    lost = _drop_repeated(effects, _find_effects([*always, *in_attempts], imported))
    reassigned = _find_changed_variables(guarded)
    for function in only_guarded:
        reassigned |= _find_changed_variables([function]) - _find_local_names(function)
    read: set[str] = set()
    for item in in_attempts:
        read |= set(_find_read_names(item)) - _find_local_names(item)
    # A variable without another value would end attempts with a NameError, which is clear enough.
    has_value = _find_bound_variables(always) | defined.keys()
    variables = sorted(reassigned & read & has_value)
    switches = [item for item in lost if item.startswith(_SWITCHES)]
    calls = [item for item in lost if item not in switches]
    return GuardedEffects(tuple(calls), tuple(variables + switches))


def find_effects_lacking_in_module(script: ast.Module, module: ast.Module) -> GuardedEffects:
    """Return the effects of a script that the module with its trainer does not have too."""
    return _find_effects_lost(script, _find_effects([module], _find_imports(module)))


def find_effects_lost_by_value(script: ast.Module, trainer: str) -> GuardedEffects:
    """Return the effects of a script that its trainer, a function sent by value, does not have too.
    Nothing is found for a trainer that is an object, because its code is unknown."""
    nodes = [node for node in ast.walk(script) if _has_name(node, trainer)]
    if not nodes:
        return GuardedEffects()
    in_attempts = [*nodes, *_reach(nodes, _find_definitions(script))]
    return _find_effects_lost(script, _find_effects(in_attempts, _find_imports(script)))


def _find_effects_lost(script: ast.Module, in_attempts: Iterable[str]) -> GuardedEffects:
    """Return the script's effects that have no equivalent ``in_attempts``. Functions that the
    script does not call have no effects."""
    statements = [node for node in script.body if not isinstance(node, _DEFINITIONS)]
    done = [*statements, *_reach(statements, _find_definitions(script))]
    lost = _drop_repeated(_find_effects(done, _find_imports(script)), in_attempts)
    switches = [item for item in lost if item.startswith(_SWITCHES)]
    calls = [item for item in lost if item not in switches]
    return GuardedEffects(tuple(calls), tuple(switches))


def _drop_repeated(effects: Iterable[str], in_attempts: Iterable[str]) -> list[str]:
    """Return the effects on settings that no effect ``in_attempts`` changes."""
    changed = {_setting_of(item) for item in in_attempts}
    return sorted({item for item in effects if _setting_of(item) not in changed})


def _has_name(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Lambda):
        return name == "<lambda>"
    return isinstance(node, _DEFINITIONS) and node.name == name


def _find_definitions(script: ast.Module) -> dict[str, Definition]:
    return {node.name: node for node in script.body if isinstance(node, _DEFINITIONS)}


def _is_guard(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _reach(nodes: Sequence[ast.AST], defined: Mapping[str, Definition]) -> list[Definition]:
    """Return the functions and classes of the script that ``nodes`` contain or mention, directly or
    through other functions."""
    reached = [node for node in nodes if isinstance(node, _DEFINITIONS)]
    to_visit = list(nodes)
    while to_visit:
        for name in _find_read_names(to_visit.pop(0)):
            if name in defined and defined[name] not in reached:
                reached.append(defined[name])
                to_visit.append(defined[name])
    return reached


def _find_read_names(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            yield inner.id


def _find_imports(script: ast.Module) -> set[str]:
    """Return the names that imports bind anywhere in a script."""
    names: set[str] = set()
    for node in ast.walk(script):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names


def _find_effects(nodes: Sequence[ast.AST], imported: set[str]) -> Iterator[str]:
    """Yield the dotted names of called functions of libraries that seed or configure the process,
    and of torch's switches that get a value."""
    for node in _walk_all(nodes):
        name = ""
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = ast.unparse(node)
        is_imported = name.partition(".")[0] in imported and name.replace(".", "").isidentifier()
        if is_imported and _setting_of(name) is not None:
            yield name


def _setting_of(name: str) -> str | None:
    """Return the setting that a function or a switch changes, or None. All seeds count as one
    setting."""
    last = name.rpartition(".")[2]
    if name.startswith(_SWITCHES):
        return name
    if "seed" in last:
        return "seed"
    return last if last in _SETTINGS else None


def _walk_all(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield from ast.walk(node)


def _find_bound_variables(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the variables that nodes assign to."""
    names = [node for node in _walk_all(nodes) if isinstance(node, ast.Name)]
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _find_changed_variables(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the variables that nodes assign to, or whose attributes or items they assign to."""
    names = _find_bound_variables(nodes)
    for node in _walk_all(nodes):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            target: ast.expr = node
            while isinstance(target, (ast.Attribute, ast.Subscript)):
                target = target.value
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def _find_local_names(definition: Definition) -> set[str]:
    """Return the local names of a function, or of a class's methods."""
    names = _find_bound_variables([definition])
    names |= {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    for node in ast.walk(definition):
        if isinstance(node, ast.Global):
            names -= set(node.names)
    return names
