"""Check the config, and name the libraries to import, before a run starts."""

from __future__ import annotations

from omegaconf import DictConfig

from robust_train.vision.curves import chosen
from robust_train.vision.keys import check_groups


def check_config(cfg: DictConfig) -> None:
    """Check ``model``, ``dataset`` and ``logger``; touch neither data nor device."""
    chosen(cfg)
    check_groups(cfg)


def preload_modules(cfg: DictConfig) -> list[str]:
    """Return the modules that this config imports, early, while a job waits. None touches CUDA."""
    check_config(cfg)
    # every torch optimizer imports torch._dynamo when it is built: more than a second
    modules = ["numpy", "PIL.Image", "torch._dynamo"]
    if chosen(cfg) == "tensorboard":
        modules.append("torch.utils.tensorboard")
    modules += {
        "digits": ["sklearn.datasets"],
        "flowers102": ["scipy.io", "torchvision.datasets"],
    }.get(cfg.dataset.name, [])
    if cfg.model.name != "cnn":
        modules += ["timm", "timm.data"]
    if cfg.model.name == "lora":
        modules.append("peft")
    return modules
