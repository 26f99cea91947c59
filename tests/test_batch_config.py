"""What ``training.batch_size``, the accumulation and the effective batch ask for, and values of any
key that are refused."""

import pytest
from omegaconf import OmegaConf

from attempts import built
from refused_values import config_of, recorded, refusal_of
from robust_train.config.attempt import for_attempt, trainer_config
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.keys import Group, schema
from robust_train.features.retry_rules.model import RetryKeys
from robust_train.model.errors import ConfigError
from robust_train.model.spec import AttemptSpec, RetryRule
from robust_train.policy.settings import PolicySettings


def of_training(**values):
    return "; ".join(f"training.{name}={value}" for name, value in values.items())


AUTO = of_training(batch_size="auto")
CHECKPOINTING = "training.gradient_checkpointing"
OF_16 = of_training(batch_size=16, effective_batch_size=64)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (False, 64, 1)),
        ("training.batch_size='24'", (False, 24, 1)),
        (of_training(batch_size=16, gradient_accumulation_steps=4), (False, 16, 4)),
        (OF_16, (False, 16, 4)),
        (f"{OF_16}; num_gpus=2", (False, 16, 2)),
        (AUTO, (True, 64, 1)),
        (f"{AUTO}; training.effective_batch_size=512", (True, 512, 1)),
        (f"{AUTO}; num_gpus=4", (True, 16, 1)),
    ],
)
def test_numbers_take_the_place_of_what_was_typed(words, expected):
    config = checked(config_of(words))
    sizes = (config.training.batch_size, config.training.gradient_accumulation_steps)
    assert (config.finds_batch_size, *sizes) == expected


@pytest.mark.parametrize(("words", "line"), recorded())
def test_meaningless_values_are_refused_as_recorded(words, line):
    """In a line with the key and the remedy; ``python tests/support/refused_values.py`` records."""
    refusal = refusal_of(words)
    assert refusal == line
    assert "\n" not in refusal


CLOSED_GROUPS = [
    name
    for name, member in schema().root.members.items()
    if isinstance(member, Group) and not member.is_open
]


@pytest.mark.parametrize("read", [complete, lambda given: checked(OmegaConf.create(given))])
@pytest.mark.parametrize("given", [3, None, [1], "https://user:password@host"])
@pytest.mark.parametrize("group", CLOSED_GROUPS)
def test_a_value_for_a_group_names_keys(group, given, read):
    with pytest.raises(ConfigError) as refused:
        read({group: given})
    line = str(refused.value)
    assert line.startswith(group)
    assert "is a group of keys, not a value; it has" in line
    for name in schema().root.members[group].members:
        assert f"{group}.{name}" in line
    assert "Keys" not in line
    assert "\n" not in line
    assert group != "notify" or "password" not in line


def test_a_script_has_rules_for_its_exit_codes():
    words = "trainer.argv=[./train]; retry.rules=[{exit_code: 7, then: retry, times: 5}]"
    assert checked(config_of(words)).of(RetryKeys).rules == (
        RetryRule("retry", exit_code=7, times=5),
    )


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0.25), (0.5, 0.125)])
def test_a_trainer_reads_its_attempts_learning_rate(factor, expected):
    cfg = config_of(of_training(batch_size=8, lr=0.25))
    config = for_attempt(checked(cfg), built(AttemptSpec, (), 8, 1, lr_factor=factor), "cpu")
    assert trainer_config(cfg, config).training.lr == expected


@pytest.mark.parametrize(
    ("words", "at_first", "is_remedy"),
    [
        ("", False, True),
        ("training.gradient_checkpointing=auto", False, True),
        ("training.gradient_checkpointing=true", True, True),
        ("training.gradient_checkpointing=false", False, False),
    ],
)
def test_a_trainer_sees_whether_gradients_are_checkpointed(words, at_first, is_remedy):
    cfg = config_of(words)
    config = checked(cfg)
    settings = PolicySettings.of(config)
    assert config.may_checkpoint_gradients is is_remedy
    seen = trainer_config(cfg, for_attempt(config, settings.asked, "cpu"))
    assert seen.training.gradient_checkpointing is at_first
