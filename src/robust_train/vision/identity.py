"""Decides whether a checkpoint of the built-in trainer belongs to the run that resumes from it.

`vision.trainer` saves a run's identity in each checkpoint, and checks it before it resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from robust_train.model.errors import ConfigError

# A resumed run may change these keys. They affect how fast or how far a run goes, but neither the
# meaning of its weights nor the order of its samples.
_CHANGEABLE = frozenset(
    {
        "dataset.root",
        "dataset.download",
        "dataset.num_workers",
        "dataset.epochs",
        "model.lr",
        "model.dropout",
        "model.lora_dropout",
    }
)


def build_identity(cfg: DictConfig, *, samples: int, classes: int) -> dict[str, str]:
    """Return the values that a checkpoint must share with a run that resumes from it."""
    identity = {"seed": str(cfg.seed), "training samples": str(samples), "classes": str(classes)}
    for group in ("model", "dataset"):
        for key, value in cfg[group].items():
            name = f"{group}.{key}"
            if name not in _CHANGEABLE:
                identity[name] = str(value)
    return identity


def check_identity(saved: Mapping[str, str], current: Mapping[str, str], path: Path) -> None:
    """Compare the identity in the checkpoint at ``path`` with the identity of the run.

    Raises:
        ConfigError: they differ. The message lists the differences.
    """
    differences = []
    for key in sorted(saved.keys() | current.keys()):
        before = saved.get(key, "absent")
        now = current.get(key, "absent")
        if before != now:
            differences.append(f"{key} was {before}, now {now}")
    if differences:
        raise ConfigError(
            f"checkpoint {path}: belongs to another run: {'; '.join(differences)}; use the "
            "same values, or another run folder to start afresh"
        )
