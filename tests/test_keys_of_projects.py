"""Which key of a Hydra project's config is the batch of its training."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from robust_train.config.attempt import trainer_config
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.projects import their_keys
from robust_train.model.errors import ConfigError
from robust_train.policy.settings import PolicySettings


def project(text):
    return OmegaConf.create(f"{{robust: {{}}, {text}}}")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("data: {train: {batch_size: 8}, val: {batch_size: 16}}", "data.train.batch_size"),
        ("loader: {batch_size: 8}, valLoader: {batch_size: 8}", "loader.batch_size"),
        ("loader: {batch_size: 8}, eval: {loader: {batch_size: 4}}", "loader.batch_size"),
        ("TRAIN: {BATCH_SIZE: 8}, TEST: {BATCH_SIZE: 16}", "TRAIN.BATCH_SIZE"),
        ("eval: {batch_size: 16}", None),
        ("validation_loader: {batch_size: 16}", None),
        ("generator: {batch_size: 8}, predict: {batch_size: 2}", "generator.batch_size"),
        ("loaders: [{name: a, batch_size: 8}], eval: {batch_size: 16}", "loaders[0].batch_size"),
        ("loaders: [{split: val, batch_size: 8}, {split: a, bs: 4}]", "loaders[1].bs"),
        # keys that refer to one number follow it, whatever that is called
        ("batch_size: 8, data: {batch_size: '${batch_size}'}", "batch_size"),
        ("data: {bsz: 8, train: {batch_size: '${..bsz}'}}, map: {batch_size: 1000}", "data.bsz"),
        ("eval: {batch_size: 8}, train: {batch_size: '${eval.batch_size}'}", "train.batch_size"),
        ("train: {batch_size: '${oc.decode:${n}}'}, n: '4'", "train.batch_size"),
        ("data: {bs: 8}, log: {batch_size: '${oc.decode:${n}}'}, n: '4'", "data.bs"),
        ("batch_size: '${x}', x: '${batch_size}'", None),
        ("batch_size: '???'", None),
        # the batch of all devices beside that of one
        (
            "train_batch_size: 64, train_micro_batch_size_per_gpu: 8",
            "train_micro_batch_size_per_gpu",
        ),
        ("global_batch_size: 64, micro_batch_size: 8", "micro_batch_size"),
        ("global_batch_size: 64", None),
        ("algo: {ppo_mini_batch_size: 64}", "algo.ppo_mini_batch_size"),
        ("val_minibatch_size: 64, bs: 8", "bs"),
        (
            "per_device_train_batch_size: 8, per_device_eval_batch_size: 9",
            "per_device_train_batch_size",
        ),
        # a name for other things, too
        ("batch: 8", "batch"),
        ("log: {batch: 100}, bs: 8", "bs"),
    ],
)
def test_the_batch_of_training_is_found(config, key):
    assert their_keys(project(config)).get("training.batch_size") == key


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            "loader: {batch_size: 8}, engine: {batch_size: 8}",
            "loader.batch_size, engine.batch_size",
        ),
        ("pretrained: {batch_size: 8}, bs: 8", "pretrained.batch_size, bs"),
        ("loaders: [{bs: 8}, {bs: 8}]", "loaders[0].bs, loaders[1].bs"),
        # reinforcement learning collects the one and trains on the other
        ("minibatch_size: 8, batch_size: 64", "minibatch_size, batch_size"),
        ("sgd_minibatch_size: 8, train_batch_size: 64", "sgd_minibatch_size, train_batch_size"),
        ("train: {batch_size: 64}, ppo: {minibatch: 8}", "train.batch_size, ppo.minibatch"),
    ],
)
def test_of_several_batches_one_line_asks(config, keys):
    first = keys.partition(",")[0]
    key = "robust.training.batch_size"
    with pytest.raises(ConfigError) as refused:
        complete(project(config))
    advice = f"choose the key that the training uses: '{key}=${{{first}}}'"
    assert str(refused.value) == f"{key}: the config has {keys}; {advice}"


@pytest.mark.parametrize("name", ["loaders[0].batch_size", "loaders.0.batch_size"])
def test_an_attempt_has_its_batch_in_a_list(name):
    cfg = project("loaders: [{batch_size: 8}, {batch_size: 8}]")
    cfg.robust.training = {"batch_size": f"${{{name}}}"}
    cfg = complete(cfg)
    config = checked(cfg)
    assert config.training.batch_size == 8
    seen = trainer_config(cfg, replace(config, training=replace(config.training, batch_size=4)))
    assert [loader.batch_size for loader in seen.loaders] == [4, 8]


@pytest.mark.parametrize(("first", "refers"), [(False, True), (True, True), (False, False)])
def test_a_referring_key_enables_gradient_checkpointing(first, refers):
    """The key refers to ours."""
    cfg = project(f"model: {{checkpointing: {first}}}, bs: 8")
    if refers:
        cfg.robust.training = {"gradient_checkpointing": "${model.checkpointing}"}
    cfg = complete(cfg)
    config = checked(cfg)
    settings = PolicySettings.of(config)
    assert settings.asked.noted("gradient_checkpointing", False) is first
    assert config.may_checkpoint_gradients is settings.can_checkpoint is refers
    turned_on = replace(config.training, gradient_checkpointing=True)
    seen = trainer_config(cfg, replace(config, training=turned_on))
    assert seen.model.checkpointing is refers
