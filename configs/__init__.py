"""Hydra imports this package to read its files, which build on the schemas that it registers."""

from hydra.core.config_store import ConfigStore

from robust_train.config import composition
from robust_train.vision import keys


def register() -> None:
    """Put the schemas of all keys into Hydra's ConfigStore, unless it has them."""
    if "robust_schema.yaml" not in ConfigStore.instance().repo:
        composition.register()
        keys.register()


register()
