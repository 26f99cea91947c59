"""YAML, the page of keys and what the launcher is handed say what the schema declares."""

import ast
from dataclasses import fields, replace

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from keys import GROUPS, ROOT, declared, written
from robust_train.assembly import FEATURES
from robust_train.config.attempt import trainer_config
from robust_train.config.checks import checked, unchecked
from robust_train.config.composition import complete, group_node
from robust_train.config.keys import Schema, group_of, schema
from robust_train.config.projects import builds_on_ours
from robust_train.config.schema import RobustConfig
from robust_train.features.detach.model import DetachKeys
from robust_train.features.expandable_segments.model import SegmentsKeys
from robust_train.features.stall.model import StallKeys
from robust_train.model.errors import ConfigError
from robust_train.vision.keys import check_config


@pytest.mark.parametrize(("path", "text"), written().items(), ids=lambda value: value[:40])
def test_a_file_has_what_the_schema_declares(path, text):
    """Else ``just keys`` was forgotten."""
    assert (ROOT / path).read_text() == text


def test_a_default_job_gets_the_declared_values():
    """It has no overrides."""
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        composed = checked(compose("robust", ["model=none", "dataset=none"]))
    assert composed.target == "robust_train.vision.trainer.train"
    of_groups = replace(composed.training, num_workers=2)  # dataset=none has 0
    composed = replace(
        composed, training=of_groups, trainer=RobustConfig().trainer, model=RobustConfig().model
    )
    assert composed == RobustConfig() == checked(complete({}))


def test_only_the_built_in_trainer_has_its_keys():
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("robust", ["training.weight_decay=0.5", "training.epochs=3"])
        others = compose("robust", ["trainer=none", "+training.weight_decay=0.1"])
    seen = trainer_config(complete(cfg), checked(cfg)).training
    assert (seen.weight_decay, seen.max_grad_norm, seen.epochs) == (0.5, 1.0, 3)
    check_config(cfg)
    cfg.training.max_grad_norm = -1
    with pytest.raises(ConfigError, match=r"training\.max_grad_norm=-1: must be 0 or more"):
        check_config(cfg)
    assert builds_on_ours(cfg)
    assert builds_on_ours(others)
    assert "max_grad_norm" not in complete(others).training
    assert complete(others).training.weight_decay == 0.1, "what a trainer adds itself"


def test_documented_types_are_those_of_the_code():
    """``auto`` is None, several types are one, and nothing can be changed."""
    given = {
        "training": {"batch_size": "32", "checkpoint_every_minutes": "auto"},
        "stall_timeout_minutes": "2.5",
        "memory": {"expandable_segments": None},
        "notify": {"command": "notify-send 'a job'", "on": "failed"},
        "own": {"key": 1},
        "seed": 7,
        "dataset": {"epochs": 3},
    }
    config = checked(complete(given))
    assert (config.training.batch_size, config.seed, config.training.epochs) == (32, 7, 3)
    assert (
        config.training.checkpoint_every_minutes
        is config.of(SegmentsKeys).expandable_segments
        is None
    )
    assert config.of(StallKeys).timeout_seconds == 150
    assert config.notify.command == ("notify-send", "a job")
    assert config.notify.on == ("failed",)
    with pytest.raises(AttributeError):
        config.training.batch_size = 64  # type: ignore[misc]


def test_a_refused_value_is_first_the_default():
    """The checks that refuse the value run later."""
    cfg = OmegaConf.create({"num_gpus": 0, "detach": True, "device": "${no.such.key}", "retry": 3})
    assert unchecked(cfg) == RobustConfig().having(DetachKeys(detach=True))


def test_every_key_of_a_feature_has_one_place():
    """A place behind a key that is not there would lose it."""
    names = [
        f"{keys.group}.{item.name}".lstrip(".")
        for feature in FEATURES
        for keys in feature.keys
        for item in fields(keys)
    ]
    assert sorted(names) == sorted(set(names))
    of_the_kernel = set(Schema().root.names())
    assert set(schema().root.names()) - of_the_kernel == set(names)
    assert of_the_kernel <= set(schema().root.names())


@pytest.mark.parametrize("section", GROUPS)
def test_groups_refuse_keys_they_do_not_declare(section):
    group, options = GROUPS[section]
    for option, cls in options.items():
        if option:
            node = group_node(group_of(cls))
            names = {key.name for key in declared(group_of(cls), f"{group}.")}
            assert {f"{group}.{key}" for key in node} == names, option
            with pytest.raises(Exception, match="no_such_key"):
                node.no_such_key = 1


def test_only_config_rooms_and_trainers_read_keys():
    config_rooms = {"config", "project_template"}
    trainers = {"vision", "integrations", "attempt/script/command.py"}  # they are given it
    reads = []
    for path in (ROOT / "src/robust_train").rglob("*.py"):
        name = str(path.relative_to(ROOT / "src/robust_train"))
        if {name, name.partition("/")[0]} & (config_rooms | trainers):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="cfg") | ast.Attribute(attr="cfg"), attr=key):
                    reads.append((name, key))
                case ast.Subscript(value=ast.Name(id="cfg"), slice=ast.Constant(value=key)):
                    reads.append((name, key))
                case ast.Call(
                    func=ast.Attribute(attr="select"),
                    args=[ast.Name(id="cfg" | "config"), ast.Constant(value=key), *_],
                ):
                    reads.append((name, key))
    assert [read for read in reads if not str(read[1]).startswith(("hydra", "copy"))] == []
