"""Check the config, and name the libraries to import, before a run starts."""

from __future__ import annotations

from omegaconf import DictConfig

from robust_train.vision.datasets import check_data
from robust_train.vision.models import check_model


def check_config(cfg: DictConfig) -> None:
    """Check the groups ``model`` and ``dataset`` without touching data or device."""
    check_model(cfg.model)
    check_data(cfg.dataset)


def preload_modules(cfg: DictConfig) -> list[str]:
    """Return the modules that this config imports, for a fork server. None touches CUDA."""
    check_config(cfg)
    # every torch optimizer imports torch._dynamo when it is built: more than a second
    modules = ["numpy", "PIL.Image", "torch.utils.tensorboard", "torch._dynamo"]
    modules += {
        "digits": ["sklearn.datasets"],
        "flowers102": ["scipy.io", "torchvision.datasets"],
    }.get(cfg.dataset.name, [])
    if cfg.model.name != "cnn":
        modules += ["timm", "timm.data"]
    if cfg.model.name == "lora":
        modules.append("peft")
    return modules
