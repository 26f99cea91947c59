"""What ``training.batch_size``, the accumulation and the effective batch ask for."""

import pytest

from robust_train.config.attempt import for_attempt, trainer_config
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.model.errors import ConfigError
from robust_train.model.spec import AttemptSpec


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"num_gpus": 4, "batch_size": "auto"}, (True, 16, 1)),
        ({"num_gpus": 2, "batch_size": 16, "effective_batch_size": 64}, (False, 16, 2)),
        ({}, (False, 64, 1)),
        ({"batch_size": 16, "gradient_accumulation_steps": 4}, (False, 16, 4)),
        ({"batch_size": "24"}, (False, 24, 1)),
        ({"batch_size": 16, "effective_batch_size": 64}, (False, 16, 4)),
        ({"batch_size": "auto"}, (True, 64, 1)),
        ({"batch_size": "auto", "effective_batch_size": 512}, (True, 512, 1)),
    ],
)
def test_numbers_take_the_place_of_what_was_typed(training, expected):
    num_gpus = training.get("num_gpus", 1)
    own = {key: value for key, value in training.items() if key != "num_gpus"}
    config = checked(complete({"num_gpus": num_gpus, "training": own}))
    found = (config.training.batch_size, config.training.gradient_accumulation_steps)
    assert (config.finds_batch_size, *found) == expected


OF_16 = {"batch_size": 16, "effective_batch_size": 64}


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"num_gpus": "${oops}"}, ["num_gpus: ", "key 'oops' not found"]),
        ({"training": {"batch_size": "atuo"}}, ["training.batch_size=atuo", "or auto"]),
        ({"training": {"batch_size": 1.5}}, ["training.batch_size=1.5", "integer"]),
        ({"training": {"batch_size": True}}, ["training.batch_size=True", "integer"]),
        ({"training": {"batch_size": "²"}}, ["training.batch_size=²", "integer"]),
        ({"retry": {"rules": 3}}, ["retry.rules=3", "a list"]),
        ({"notify": {"command": 3}}, ["notify.command=3", "a list"]),
        ({"notify": {"on": True}}, ["notify.on=True", "a list"]),
        (
            {"training": {"batch_size": "auto", "gradient_accumulation_steps": 4}},
            ["gradient_accumulation_steps=4", "training.effective_batch_size"],
        ),
        (
            {"training": {"batch_size": 24, "effective_batch_size": 64}},
            ["training.effective_batch_size=64", "not a multiple of training.batch_size=24"],
        ),
        (
            {"training": {"batch_size": 128, "effective_batch_size": 64}},
            ["training.effective_batch_size=64", "not a multiple"],
        ),
        (
            {"training": {**OF_16, "gradient_accumulation_steps": 2}},
            ["gradient_accumulation_steps=2", "only one of the two"],
        ),
        ({"training": {"effective_batch_size": 0}}, ["effective_batch_size=0", "1 or more"]),
        (
            {"training": {"batch_size": "auto"}, "preserve_effective_batch_size": False},
            ["preserve_effective_batch_size=false", "depend on the GPU"],
        ),
        (
            {"training": {"batch_size": "auto"}, "min_batch_size": 65},
            ["min_batch_size=65", "above 64", "training.effective_batch_size"],
        ),
        (
            {"training": {"batch_size": "auto"}, "num_gpus": 3},
            ["training.effective_batch_size=64", "not a multiple of num_gpus=3"],
        ),
        (
            {"training": OF_16, "num_gpus": 3},
            ["training.effective_batch_size=64", "batch_size=16 × num_gpus=3"],
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_key_and_remedy(cfg, words):
    with pytest.raises(ConfigError) as refused:
        checked(complete(cfg))
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0.25), (0.5, 0.125)])
def test_a_trainer_reads_the_learning_rate_of_its_attempt(factor, expected):
    cfg = complete({"training": {"batch_size": 8, "lr": 0.25}})
    spec = AttemptSpec((), 8, 1, lr_factor=factor)
    config = for_attempt(checked(cfg), spec, "cpu")
    assert trainer_config(cfg, config).training.lr == expected
