"""A fresh run of each golden case, against what users saw of it when it was recorded."""

import difflib
import re
from pathlib import Path

import pytest

from golden.runs import CASES, Bench
from golden.seen import seen

SEEN = Path(__file__).parent / "seen"
CHEAPEST = ("bug", "killed")


def recorded(name):
    """Return what users saw of a case."""
    return (SEEN / f"{name}.txt").read_text()


def without_command(text):
    """Return a text without the commands, because a fork does not know its own."""
    return re.sub(r'command": "[^"]*"', 'command": "<command>"', text)


def compare(before, now):
    """Fail with the lines that differ."""
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), "recorded", "now", lineterm=""
    )
    if before != now:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("name", CHEAPEST)
def test_users_see_what_was_recorded(name, tmp_path, gpu_libraries):
    """If a change is meant: python tests/golden/seen.py NAME, and read the difference."""
    now = seen(Bench(tmp_path, gpu_libraries), name)
    compare(without_command(recorded(name)), without_command(now))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_users_see_what_was_recorded_in_every_case(name, tmp_path, gpu_libraries):
    """The commands begin as users' do."""
    bench = Bench(tmp_path, gpu_libraries)
    bench.alone = True
    compare(recorded(name), seen(bench, name))
