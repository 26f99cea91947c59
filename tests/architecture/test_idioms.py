"""No line of the package costs its reader a second look."""

import ast

import pytest
from idioms import SOURCES, idioms_in

A_CLEAN_MODULE = """
class Counter:
    def __init__(self):
        self.count = 0

    def add(self, numbers, name=None):
        label = name or "numbers"
        is_usable = bool(numbers) and label != "none"
        if numbers and (last := numbers[-1]):
            self.count += (last or 0) + 1
        left, right = numbers
        left, right = right, left
        return [number for number in numbers if number and left]
"""

SNIPPETS = {
    "first, second = 1, 2": "a tuple assignment that is not a swap",
    "text = name and name.upper()": "'and' as a value",
    "text = name or read_name()": "'or' as a value without a literal or a name as its default",
    "sign = 1 if up else 0 if flat else -1": "a conditional expression within another",
    "print(text := read())": "a walrus outside of the condition of an if or a while",
    "ending = 's' * (count > 1)": "arithmetic with a condition",
    "total = count + (more and len(more))": "arithmetic with a condition",
    "rows = [[cell for cell in row] for row in table]": "a comprehension within another",
    "class Late:\n    def __init__(self): pass\n    def open(self): self.file = open('x')": (
        "self.file is born outside of __init__"
    ),
}


def names_in(code):
    return {name for _, name in idioms_in(ast.parse(code))}


def test_source_has_no_idiom_of_the_list():
    lines_found = []
    for path in sorted(SOURCES.rglob("*.py")):
        for line, name in sorted(idioms_in(ast.parse(path.read_text()))):
            lines_found.append(f"{path.relative_to(SOURCES.parent)}:{line}: {name}")
    assert not lines_found, "\n".join(lines_found)


@pytest.mark.parametrize("code", SNIPPETS)
def test_each_idiom_is_found(code):
    assert SNIPPETS[code] in names_in(code)


def test_clean_module_has_none():
    assert names_in(A_CLEAN_MODULE) == set()
