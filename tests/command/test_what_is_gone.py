"""What earlier versions had: a command, key or name that is gone says in one line what to write."""

from __future__ import annotations

import importlib

import pytest

from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.refusals import REFUSALS, composed, explain
from robust_train.model.errors import ConfigError

_INSTEAD_OF_A_PLAN = "training.batch_size=auto .*`accelerate estimate-memory`"


@pytest.mark.parametrize(
    ("name", "instead"),
    [("plan_memory", _INSTEAD_OF_A_PLAN), ("MemoryPlan", _INSTEAD_OF_A_PLAN)],
)
def test_a_name_that_is_gone_says_what_to_import(name: str, instead: str):
    with pytest.raises(ImportError, match=f"robust_train.{name} is gone: {instead}"):
        getattr(importlib.import_module("robust_train"), name)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (
            "num_nodes=2",
            "num_nodes: this key is gone; start one rank per GPU with torchrun, srun, …; see "
            "docs/several-machines.md",
        ),
        (
            "reuse_known_batch=false",
            "reuse_known_batch: this key is gone; leave it out: the first size is "
            "training.batch_size, and a size that does not fit costs one step",
        ),
    ],
)
def test_a_key_that_is_gone_is_refused_on_the_command_line_and_in_a_config(key: str, line: str):
    with pytest.raises(REFUSALS) as refused:
        composed([key])
    assert explain(refused.value, "robust", [key]) == line
    name, _, value = key.partition("=")
    with pytest.raises(ConfigError) as refused:
        checked(complete({name: value}))
    assert str(refused.value) == line
