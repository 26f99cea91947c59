"""Idioms that cost the reader a second look, found in syntax trees.

``python tests/architecture/idioms.py [FILE or FOLDER …]`` prints each with its file and line.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)


def idioms_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each idiom in a module's syntax tree."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in parents:
        match node:
            case ast.Assign(targets=[ast.Tuple() as names], value=ast.Tuple() as values):
                if {ast.dump(name) for name in names.elts} != _as_targets(values):
                    yield node.lineno, "a tuple assignment that is not a swap"
            case ast.BoolOp(op=ast.And()) if not _is_condition(node, parents):
                yield node.lineno, "'and' as a value"
            case ast.BoolOp(op=ast.Or()) if not _is_condition(node, parents):
                if not isinstance(node.values[-1], _DEFAULTS):
                    yield node.lineno, "'or' as a value without a literal or a name as its default"
            case ast.IfExp() if any(isinstance(inner, ast.IfExp) for inner in _inside(node)):
                yield node.lineno, "a conditional expression within another"
            case ast.NamedExpr() if not _is_of_a_branch(node, parents):
                yield node.lineno, "a walrus outside of the condition of an if or a while"
            case ast.BinOp(op=operation) if isinstance(operation, _ARITHMETIC):
                if _is_counted(node.left) or _is_counted(node.right):
                    yield node.lineno, "arithmetic with a condition"
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                if any(isinstance(inner, _COMPREHENSIONS) for inner in _inside(node)):
                    yield node.lineno, "a comprehension within another"
            case ast.ClassDef():
                yield from _born_late(node, _of_bases(node, tree))


_DEFAULTS = (ast.Constant, ast.Name, ast.Attribute, ast.List, ast.Tuple, ast.Dict)


def _is_counted(node: ast.AST) -> bool:
    """Return whether an operand of arithmetic is a condition, and not a value or its default."""
    match node:
        case ast.BoolOp(op=ast.Or(), values=[*_, default]):
            return not isinstance(default, _DEFAULTS)
    return isinstance(node, (ast.BoolOp, ast.Compare))


def _as_targets(values: ast.Tuple) -> set[str]:
    return {ast.dump(value).replace("Load()", "Store()") for value in values.elts}


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    return (inner for child in ast.iter_child_nodes(node) for inner in ast.walk(child))


def _is_condition(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether only the truth of an ``and`` or ``or`` is asked for, as far as can be seen."""
    if isinstance(node, ast.BoolOp) and _is_truth(node.values[-1]):
        # The other values are conditions too: nobody mixes a bool with something else.
        return True
    parent = parents[node]
    match parent:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            return parent.test is node
        case ast.comprehension():
            return node in parent.ifs
        case ast.GeneratorExp(elt=element):
            return element is node and _is_condition(parent, parents)
        case ast.match_case():
            return parent.guard is node
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id="bool" | "any" | "all")):
            return True
        case ast.BoolOp():
            return _is_condition(parent, parents)
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return _is_truth(target)
        case ast.keyword(arg=str() as name):
            return _is_truth_by_name(ast.Name(name))
        case ast.Return():
            function = _function_of(parent, parents)
            return isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    return False


def _function_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.FunctionDef:
    while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node = parents[node]
    return node


def _is_truth(node: ast.AST) -> bool:
    """Return whether an expression is a bool by its form or by its name."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()) | ast.Constant(value=bool()):
            return True
        case ast.BoolOp():
            return _is_truth(node.values[-1])
        case ast.Call(func=function):
            return _is_truth_by_name(function) or _name_of(function).startswith(_ASKING)
        case ast.Name() | ast.Attribute():
            return _is_truth_by_name(node)
    return False


_TRUTHS = ("is", "has", "can", "are", "may", "was", "should", "needs", "does", "will", "must")
# functions that answer yes or no by a verb in the third person
_ASKING = ("adds_", "asks_", "ends_", "hides_", "names_", "suits")
_BUILT_IN_TRUTHS = {
    *("isinstance", "issubclass", "callable", "hasattr", "any", "all", "bool"),
    *(
        "startswith",
        "endswith",
        "exists",
        "is_dir",
        "is_file",
        "isdigit",
        "issubset",
        "isidentifier",
    ),
}


def _is_truth_by_name(node: ast.AST) -> bool:
    name = _name_of(node)
    return name in _BUILT_IN_TRUTHS or name.split("_")[0] in _TRUTHS


def _name_of(node: ast.AST) -> str:
    name: str = getattr(node, "id", None) or getattr(node, "attr", "")
    return name.lstrip("_")


def _is_of_a_branch(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, (ast.If, ast.While)):
            return parent.test is node
        node = parent
    return False


def _of_bases(owner: ast.ClassDef, tree: ast.AST) -> set[str]:
    """Return what the bases of a class in the same module declare."""
    bases = {_name_of(base) for base in owner.bases}
    names = set()
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef) and node.name in bases:
            names |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    return names


def _born_late(owner: ast.ClassDef, of_bases: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the attributes of a class that another method than ``__init__`` gives it."""
    methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    starts = [method for method in methods if method.name in ("__init__", "__new__")]
    if not starts:
        return
    declared = {node.target.id for node in owner.body if isinstance(node, ast.AnnAssign)}
    declared |= {
        name.id for node in owner.body if isinstance(node, ast.Assign) for name in node.targets
    }
    born = declared | of_bases | {name for start in starts for name, _ in _attributes_set(start)}
    setters = {method.name for method in methods}
    for method in methods:
        for name, line in _attributes_set(method):
            if name not in born and name not in setters and name not in _read_first(method):
                yield line, f"self.{name} is born outside of __init__"


def _read_first(method: ast.FunctionDef) -> set[str]:
    """Return what a method changes to a value of what it was: a base in another module has it."""
    names = set()
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                read = {item.attr for item in ast.walk(node.value) if _is_of_self(item)}
                names |= read & {name}
    return names


def _is_of_self(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="self")):
            return True
    return False


def _attributes_set(method: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name, node.lineno


def main(places: list[str]) -> int:
    """Print the idioms below some files and folders; return the exit code."""
    count = 0
    for place in places or [str(SOURCES)]:
        path = Path(place)
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            for line, name in sorted(idioms_in(ast.parse(file.read_text()))):
                print(f"{file}:{line}: {name}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
