"""The page of all keys, the YAML defaults and the schema say the same."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import MISSING, DictConfig, OmegaConf

from robust_train.config import schema

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
ROWS = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \| .+ \|$", PAGE.read_text(), re.M))
GROUPS = {
    "model": (
        schema.CnnConfig,
        schema.LinearProbeConfig,
        schema.LoraModelConfig,
        schema.FullFinetuneConfig,
    ),
    "dataset": (schema.DatasetConfig, schema.ImageFolderConfig),
    "trainer": (schema.CommandConfig,),
    "training": (schema.TrainingConfig,),
    "memory": (schema.MemoryConfig,),
    "notify": (schema.NotifyConfig,),
    "retry": (schema.RetryConfig,),
}


def keys_of_the_schema() -> dict[str, set[object]]:
    """Every key, with the defaults that dataclasses give it."""
    found: dict[str, set[object]] = {}
    for item in dataclasses.fields(schema.RobustConfig):
        if item.name not in GROUPS:
            found.setdefault(item.name, set()).add(_default(item))
    for group, classes in GROUPS.items():
        for cls in classes:
            for item in dataclasses.fields(cls):
                found.setdefault(f"{group}.{item.name}", set()).add(_default(item))
    return found


def _default(item: dataclasses.Field) -> object:
    if item.default_factory is not dataclasses.MISSING:
        return str(item.default_factory())
    return item.default


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        return compose("robust")


def test_every_key_of_the_schema_is_on_the_page_and_no_other():
    assert set(ROWS) == set(keys_of_the_schema())


def test_the_page_states_the_default_that_yaml_and_dataclass_have(composed: DictConfig):
    for key, defaults in keys_of_the_schema().items():
        stated = re.fullmatch(r"`([^`]*)`", ROWS[key])
        if stated is None or key.startswith(("model.", "dataset.", "trainer.")):
            continue  # the page names where it comes from, or it differs between groups
        from_yaml = OmegaConf.select(composed, key)
        raw = OmegaConf.to_container(composed, resolve=False)
        for part in key.split("."):
            raw = raw[part]  # type: ignore[index,call-overload]
        if isinstance(raw, str) and raw.startswith("${"):
            assert stated[1] in raw
            continue
        (default,) = defaults
        assert _as_text(from_yaml) == _as_text(default) == _as_text_of_page(stated[1]), key


OPTIONS = {
    "model": dict(
        zip(("cnn", "linear_probe", "lora", "full_finetune"), GROUPS["model"], strict=True)
    ),
    "dataset": {
        "digits": schema.DatasetConfig,
        "flowers102": schema.DatasetConfig,
        "cub200": schema.DatasetConfig,
        "image_folder": schema.ImageFolderConfig,
    },
    "trainer": {"command": schema.CommandConfig},
}


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group in OPTIONS for option in OPTIONS[group]]
)
def test_an_option_of_a_group_has_the_defaults_of_its_dataclass_and_of_the_page(group, option):
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        values = OmegaConf.to_container(compose("robust", [f"{group}={option}"])[group])
    for item in dataclasses.fields(OPTIONS[group][option]):
        key, default = f"{group}.{item.name}", _default(item)
        stated = re.findall(r"`([^`]*)`", ROWS[key])
        text = _as_text(values[item.name])  # type: ignore[index,call-overload]
        if group == "model" and default is not MISSING:
            assert text == _as_text(default), key
        if stated and values[item.name] != MISSING and ", or" not in ROWS[key]:
            assert text in (", ".join(stated), str(stated)) or text == _as_text_of_page(stated[0])


def _as_text(value: object) -> str:
    if value is None or value is MISSING:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _as_text_of_page(text: str) -> str:
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def test_only_the_config_s_own_rooms_and_trainers_read_its_keys():
    own = {"config", "settings.py", "project_template"}
    trainers = {"vision", "planning", "integrations", "script/command.py"}  # they are given it
    found = []
    for path in (ROOT / "src/robust_train").rglob("*.py"):
        name = str(path.relative_to(ROOT / "src/robust_train"))
        if {name, name.partition("/")[0]} & (own | trainers):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="cfg") | ast.Attribute(attr="cfg"), attr=key):
                    found.append((name, key))
                case ast.Subscript(value=ast.Name(id="cfg"), slice=ast.Constant(value=key)):
                    found.append((name, key))
                case ast.Call(
                    func=ast.Attribute(attr="select"),
                    args=[ast.Name(id="cfg" | "config"), ast.Constant(value=key), *_],
                ):
                    found.append((name, key))
    assert [one for one in found if not str(one[1]).startswith(("hydra", "copy"))] == []
