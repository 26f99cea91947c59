"""Hydra's global state and logging, for a process that did not compose the config."""

from __future__ import annotations

import contextlib
import logging
import logging.config
import sys
from collections.abc import Iterator

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"


@contextlib.contextmanager
def logged_to_screen() -> Iterator[None]:
    """Show the launcher's lines within the block, unless the program has set up logging itself."""
    logger = logging.getLogger("robust_train")
    if logger.hasHandlers():
        yield
        return
    level, handler = logger.level, logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def adopt_hydra(hydra_cfg: DictConfig | None) -> None:
    """Give a fresh process the job's ``HydraConfig`` and logging; without Hydra a plain format."""
    if hydra_cfg is None:
        if not logging.getLogger().handlers:
            logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=_FORMAT)
        return
    setup_globals()  # the resolvers that Hydra's own config uses, ${now:} among them
    instance = HydraConfig.instance()
    instance.cfg = hydra_cfg  # type: ignore[assignment]  # as Hydra itself sets it
    logging_cfg = hydra_cfg.hydra.get("job_logging")
    if logging_cfg is not None:
        settings = OmegaConf.to_container(logging_cfg, resolve=True)
        assert isinstance(settings, dict)
        logging.config.dictConfig({str(key): value for key, value in settings.items()})
