"""What a checkpoint holds: everything needed to resume as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from robust_train.model.errors import ConfigError
from robust_train.step.batcher import MicroBatcher
from robust_train.step.rewind import capture_rng, restore_rng
from robust_train.vision import sharding
from robust_train.vision.models import load_trained_state, trained_state
from robust_train.vision.step import Precision

FORMAT = 2

Content = Mapping[str, Any]  # A checkpoint that was read; `REQUIRED` keys are there
REQUIRED = frozenset(
    {"format", "identity", "position", "model", "optimizer", "rng", "epoch_loss"}
)
"""Keys without which a file is no checkpoint of ours."""

# these change how fast or how far a run goes, not the meaning of weights and sample order
_NOT_IDENTITY = frozenset(
    f"dataset.{key}" for key in ("root", "download", "num_workers", "epochs")
) | {"model.lr", "model.dropout", "model.lora_dropout"}


@dataclass
class ResumePosition:
    """The position of a run, in terms that no split into micro-batches changes: optimizer steps
    done, the current epoch from 0, and its samples that are done; all of them during validation.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0


class LossAverage:
    """A mean over samples, summed on the device: only reading it waits for the device."""

    def __init__(self, total: float = 0.0, samples: int = 0) -> None:
        self._total: Tensor | float = total
        self._samples = samples

    def add(self, mean_loss: Tensor, samples: int) -> None:
        """Add the mean loss of ``samples`` samples."""
        self._total = self._total + mean_loss * samples
        self._samples += samples

    def value(self) -> float:
        """Return the mean, 0 before the first sample."""
        return float(self._total) / max(self._samples, 1)

    def state(self) -> tuple[float, int]:
        """Return sum and number, for a checkpoint."""
        return float(self._total), self._samples


@dataclass
class TrainingState:
    """Everything of a run that changes while it trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    device: torch.device
    identity: Mapping[str, str]
    batcher: MicroBatcher
    is_sharded: bool = False
    position: ResumePosition = field(default_factory=ResumePosition)
    epoch_loss: LossAverage = field(default_factory=LossAverage)

    def weights(self, *, is_main: bool = True) -> Any:
        """Return the trained weights, whole on the main rank; if sharded, all ranks call it."""
        weights = trained_state(self.model)
        return sharding.whole(weights, keeps=is_main) if self.is_sharded else weights

    def content(self) -> dict[str, object]:
        """Return what to save: tensors (shared with the run, not copied) and plain values."""
        return {
            "format": FORMAT,
            "identity": dict(self.identity),
            "position": asdict(self.position),
            "model": trained_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "rng": capture_rng(self.device),
            "epoch_loss": list(self.epoch_loss.state()),
            "micro_batch": self.batcher.state(),
            "device": _kind_of(self.device),
        }

    def restore(self, content: Content, path: Path) -> None:
        """Restore what :meth:`content` returned."""
        _check_identity(content, self.identity, path)
        try:
            load_trained_state(self.model, content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"checkpoint {path}: {str(error).splitlines()[0]}"
            ) from error
        # empty if the checkpoint was written without scaling, e.g. on the CPU
        if self.precision.scaler.is_enabled() and content["scaler"]:
            self.precision.scaler.load_state_dict(content["scaler"])
        restore_rng(content["rng"], self.device)
        self.position = ResumePosition(**content["position"])
        total, samples = content["epoch_loss"]
        self.epoch_loss = LossAverage(total, samples)
        # a size that fits one kind of device need not fit another
        if content.get("device") == _kind_of(self.device):
            self.batcher.restore(content["micro_batch"])


def _kind_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def identity_of(
    cfg: DictConfig, train_samples: int, num_classes: int
) -> dict[str, str]:
    """Return what a checkpoint has in common with any run that may resume from it."""
    identity: dict[str, str] = {
        "training.seed": str(cfg.training.seed),
        "training samples": str(train_samples),
        "classes": str(num_classes),
    }
    for group in ("model", "dataset"):
        values = OmegaConf.to_container(cfg[group], resolve=True)
        assert isinstance(values, dict)
        identity |= {f"{group}.{key!s}": str(value) for key, value in values.items()}
    return {key: value for key, value in identity.items() if key not in _NOT_IDENTITY}


def _check_identity(content: Content, here: Mapping[str, str], path: Path) -> None:
    if content.get("format") != FORMAT:
        raise ConfigError(
            f"checkpoint {path}: has format {content.get('format')}, this version reads {FORMAT}"
        )
    there = content["identity"]
    differences = [
        f"{key} was {there.get(key, 'absent')}, now {here.get(key, 'absent')}"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if differences:
        raise ConfigError(
            f"checkpoint {path}: belongs to another run: {'; '.join(differences)}; use the same "
            "values, or another run folder to start afresh"
        )
