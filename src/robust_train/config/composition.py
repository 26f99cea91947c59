"""Registers the package's keys with Hydra, and completes a config with their defaults.

The keys are typed nodes in a root config that also accepts a user's own keys. The YAML files under
``configs/`` refer to these nodes by name, so every process that composes a config calls `register`
first. If a program passes a config to the launcher, `complete` adds the missing keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from robust_train.compat import nodes_of, register_resolver, set_nodes
from robust_train.config.checks import refuse_values_of_groups, unknown_key
from robust_train.config.keys import Group, Key, group_of, schema
from robust_train.config.projects import GROUP, defaults_for_theirs, is_theirs, ours
from robust_train.config.schema import TrainerConfig, TrainingConfig
from robust_train.config.trainers import folder_name
from robust_train.model.errors import ConfigError

_GROUPS: dict[str, Any] = {"model": {}, "dataset": {}, "trainer": {}}

# Interpolations for the keys of ``training`` whose default is the value of another key.
_FOLLOWING = {
    item.name: f"${{oc.select:{item.metadata['key'].follows},{item.default}}}"
    for item in fields(TrainingConfig)
    if item.metadata["key"].follows
}


def open_root(root: Group) -> DictConfig:
    """Return a root config with typed keys that accepts other keys as well. With a dataclass as the
    root, Hydra would reject a user's top-level keys."""
    config = OmegaConf.create({})
    for name, node in _make_nodes(root).items():
        config[name] = node
    return config


def group_node(group: Group) -> DictConfig:
    """Return the typed keys of a group, with the defaults as YAML writes them."""
    node: DictConfig = OmegaConf.structured(group.owner)
    # The dataclass is frozen, but a config is not.
    OmegaConf.set_readonly(node, None)
    set_nodes(node, _make_nodes(group))
    return node


def _make_nodes(group: Group) -> dict[str, Any]:
    """Return a node for each member of a group, by name."""
    # A dataclass declares several keys, so its nodes are made once.
    nodes_by_owner: dict[type, dict[str, object]] = {}
    nodes: dict[str, Any] = {}
    for name, member in group.members.items():
        if isinstance(member, Group):
            nodes[name] = MISSING if member.is_open else group_node(member)
        elif member.about.is_untyped:
            nodes[name] = _untyped_node(member)
        else:
            owner = member.owner
            if owner not in nodes_by_owner:
                nodes_by_owner[owner] = nodes_of(OmegaConf.structured(owner))
            nodes[name] = nodes_by_owner[owner][name]
    return nodes


def _untyped_node(key: Key) -> object:
    """Return the node of a key that accepts several types."""
    value = key.item.default if key.about.written is ... else key.about.written
    if isinstance(value, tuple):
        # OmegaConf 2.4 keeps a tuple as it is, and a user's list could not replace it.
        value = list(value)
    return nodes_of(OmegaConf.create({"value": value}))["value"]


def register() -> None:
    """Put the schemas into Hydra's ConfigStore, without ``model``, ``dataset`` and ``trainer`` at
    the root. These names belong to the project unless it chooses an option of this package."""
    for name, keys in (("robust_base_schema", schema().plain), ("robust_schema", schema().root)):
        root = open_root(keys)
        for group in _GROUPS:
            del root[group]
        ConfigStore.instance().store(name=name, node=root, provider="robust_train")
    store_group("trainer", "command", TrainerConfig)


def store_group(group: str, option: str, owner: type, *, base: type | None = None) -> None:
    """Put the keys of a group's option into Hydra's ConfigStore. The keys of ``base``, the type of
    the group without an option, are left out, so that they keep their values."""
    node = group_node(group_of(owner))
    with open_dict(node):
        for item in fields(base) if base is not None else ():
            del node[item.name]
    ConfigStore.instance().store(
        group=f"robust/schema/{group}", name=option, node=node, provider="robust_train"
    )


def complete(cfg: Mapping[str, Any] | DictConfig) -> DictConfig:
    """Add the missing keys to ``cfg``, with the defaults of :class:`RobustConfig`. In a project's
    config, add them to its group ``robust``.

    Raises:
        ConfigError: a value has the wrong type.
    """
    given: Any = cfg
    whole = given if isinstance(given, DictConfig) else OmegaConf.create(given)
    if not is_theirs(whole):
        completed = _complete(whole)
        # The cache has the time to which the caller's config may already have resolved ``now``. The
        # run folder may be named after it.
        OmegaConf.copy_cache(whole, completed)
        return completed
    whole = whole.copy()
    with read_write(whole), open_dict(whole):
        whole[GROUP] = OmegaConf.merge(defaults_for_theirs(whole), ours(whole))
        whole[GROUP] = _complete(whole[GROUP], f"{GROUP}.")
    return whole


def _complete(cfg: Any, prefix: str = "") -> DictConfig:
    base = _GROUPS if prefix else _GROUPS | {"training": _FOLLOWING}
    refuse_values_of_groups(cfg, prefix)
    try:
        merged = OmegaConf.merge(open_root(schema().root), base, cfg)
    except OmegaConfBaseException as error:
        raise _as_config_error(error, prefix) from None
    assert isinstance(merged, DictConfig)
    return merged


def plain_config(cfg: DictConfig) -> DictConfig:
    """Return the config of a ``train.py`` job: one attempt, which neither chooses nor waits for a
    GPU."""
    plain = complete(cfg)
    is_program = OmegaConf.select(plain, "trainer.argv") is not None
    plain.isolation = "process" if is_program else "none"
    plain.auto_device = plain.gpu_queue = plain.wait_for_gpu = False
    plain.min_gpu_memory_mb = 0
    plain.min_batch_size = 1
    return plain


def _as_config_error(error: OmegaConfBaseException, prefix: str) -> ConfigError:
    """Return the error for the user, with the accepted keys if a key does not exist."""
    full_key = f"{prefix}{error.full_key}"
    parent, _, name = full_key.rpartition(".")
    kind = error.object_type
    accepted = [item.name for item in fields(kind)] if is_dataclass(kind) else []
    group = schema().root.members.get(str(error.full_key).partition(".")[0])
    if accepted and isinstance(group, Group):
        accepted = list(dict.fromkeys(accepted + list(group.members)))
    if not (isinstance(error, ConfigKeyError) and accepted):
        return ConfigError(str(error).splitlines()[0] + f" (key {full_key})")
    return unknown_key(name, accepted, f"{parent}.")


# Both are registered on import, because the processes of Hydra's launchers build no search path.
# The process id is cached like Hydra's ``now``, so that the jobs of a sweep that run in other
# processes have the same sweep folder.
register_resolver("robust_pid", os.getpid, use_cache=True)
register_resolver("robust_job", folder_name)
