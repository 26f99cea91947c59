"""A command that stands still in a test says where."""

import os

import pytest

import warm

STANDS = "import time\ndef stands_here(): time.sleep(600)\nstands_here()"


def test_a_slow_command_is_killed_with_stacks():
    """The error has each stack."""
    with pytest.raises(AssertionError, match="in stands_here") as late:
        warm.run(("-c", STANDS), os.environ, timeout=1)
    assert "after 1 s it ran on" in str(late.value)
