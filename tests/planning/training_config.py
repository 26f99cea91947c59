"""Configs as ``robust-train plan`` composes them."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from omegaconf import DictConfig


def config(*overrides: str) -> DictConfig:
    """``configs/robust.yaml`` with ``overrides``."""
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        return compose("robust", overrides=list(overrides))
