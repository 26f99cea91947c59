"""A test's name is a short sentence about behaviour; what it leaves out is in the docstring.

A variable is named for the thing it holds.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MOST_WORDS = 8
WITHOUT_A_NOUN = {"one", "found", "own", "known", "asked"}


def long_names_in(tree):
    """Yield the line and the name of each test whose name has too many words."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kind, *words = node.name.split("_")
            if kind == "test" and len(words) > MOST_WORDS:
                yield node.lineno, node.name


def names_without_a_noun_in(tree):
    """Yield the line and the name of each variable that is named for no thing."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ExceptHandler(name=name)
                | ast.MatchAs(name=name)
                | ast.alias(asname=name)
            ) if name in WITHOUT_A_NOUN:
                yield node.lineno, name


@pytest.mark.parametrize("names_in", [long_names_in, names_without_a_noun_in])
def test_no_file_has_such_a_name(names_in):
    lines = []
    for path in sorted(TESTS.rglob("*.py")):
        for line, name in names_in(ast.parse(path.read_text())):
            lines.append(f"{path.relative_to(TESTS.parent)}:{line}: {name}")
    assert not lines, "\n".join(lines)


def test_the_ninth_word_is_too_many():
    eight = "def test_a_name_may_have_eight_words_and_ends(): pass\n"
    nine = "async def test_a_name_must_never_have_nine_words_in_it(): pass\n"
    long_names = [name for _, name in long_names_in(ast.parse(eight + nine))]
    assert long_names == ["test_a_name_must_never_have_nine_words_in_it"]


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "for one in rows: pass",
        "first, own = rows",
        "sums = [one + 1 for one in rows]",
        "self.known = set()",
        "def test(asked): pass",
        "def known(): pass",
        "count = lambda own: len(own)",
        "import robust_train as own",
        "with open('f') as found: pass",
        "try: pass\nexcept OSError as found: pass",
        "match row:\n    case [found]: pass",
    ],
)
def test_each_name_without_a_noun_is_seen(code):
    assert list(names_without_a_noun_in(ast.parse(code)))


def test_names_that_others_chose_are_allowed():
    code = "settings.asked = replace(settings.asked, asked=row['found'])"
    assert list(names_without_a_noun_in(ast.parse(code))) == []
