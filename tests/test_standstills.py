"""A command that stands still in a test says where."""

import os

import pytest

import warm

STANDS = "import time\ndef stands_here(): time.sleep(600)\nstands_here()"


def test_a_command_that_takes_too_long_is_killed_and_each_stack_is_in_the_error():
    with pytest.raises(AssertionError, match="in stands_here") as late:
        warm.run(("-c", STANDS), os.environ, timeout=1)
    assert "after 1 s it ran on" in str(late.value)
