"""What earlier versions had: a command, key or name that is gone says in one line what to write."""

import re

import pytest

import robust_train
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.refusals import REFUSALS, composed, explain
from robust_train.model.errors import ConfigError


@pytest.mark.parametrize("name", ["plan_memory", "MemoryPlan"])
def test_a_name_that_is_gone_says_what_to_import(name):
    instead = "training.batch_size=auto .*`accelerate estimate-memory`"
    with pytest.raises(ImportError, match=f"robust_train.{name} is gone: {instead}"):
        getattr(robust_train, name)


RANKS = "start one rank per GPU with torchrun, srun, …; see docs/several-machines.md"
SIZES = "the first size is training.batch_size, and a size that does not fit costs one step"


@pytest.mark.parametrize(
    ("key", "instead"),
    [("num_nodes=2", RANKS), ("reuse_known_batch=false", f"leave it out: {SIZES}")],
)
def test_a_key_that_is_gone_is_refused_on_the_command_line_and_in_a_config(key, instead):
    name, _, value = key.partition("=")
    line = f"{name}: this key is gone; {instead}"
    with pytest.raises(REFUSALS) as refused:
        composed([key])
    assert explain(refused.value, "robust", [key]) == line
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        checked(complete({name: value}))
