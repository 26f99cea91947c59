"""A test's name is a short sentence about behaviour; what it leaves out is in the docstring."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
MOST_WORDS = 8


def long_names_in(tree):
    """Yield the line and the name of each test whose name has too many words."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kind, *words = node.name.split("_")
            if kind == "test" and len(words) > MOST_WORDS:
                yield node.lineno, node.name


def test_no_name_has_more_than_eight_words():
    long_names = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for line, name in long_names_in(ast.parse(path.read_text())):
            long_names.append(f"{path.relative_to(TESTS.parent)}:{line}: {name}")
    assert not long_names, "\n".join(long_names)


def test_the_ninth_word_is_too_many():
    eight = "def test_a_name_may_have_eight_words_and_ends(): pass\n"
    nine = "async def test_a_name_must_never_have_nine_words_in_it(): pass\n"
    long_names = [name for _, name in long_names_in(ast.parse(eight + nine))]
    assert long_names == ["test_a_name_must_never_have_nine_words_in_it"]
