"""Sets up logging: short lines on the screen, and no traceback when a log file's disk is full.

``launch`` and ``robust-train run`` run a job within `log_to_screen`. Each attempt's interpreter
calls `adopt_hydra`. Launchers and sweeps call `shorten_lines`, which replaces Hydra's format.
"""

from __future__ import annotations

import contextlib
import logging
import logging.config
import sys
from collections.abc import Iterator
from functools import partial

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from robust_train.compat import format_of
from robust_train.host.loggers import ShortLines, show_lines, showing_lines
from robust_train.host.streams import log_handlers, never_blocking_output

# Hydra's default formats, of a job and of a sweep.
_HYDRAS_FORMATS = (
    "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
    "[%(asctime)s][HYDRA] %(message)s",
)


@contextlib.contextmanager
def log_to_screen() -> Iterator[None]:
    """Show the launcher's lines within the block, unless the program has set up logging itself."""
    with never_blocking_output():
        drop_lines_on_full_disk()
        with showing_lines():
            yield


def adopt_hydra(hydra_cfg: DictConfig | None) -> None:
    """Give a new process the job's ``HydraConfig`` and logging, or a plain format without Hydra."""
    if hydra_cfg is None:
        # With a handler on the root logger, a program's own basicConfig() would have no effect.
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(ShortLines())
        logging.lastResort = handler
        logging.getLogger().setLevel(logging.INFO)
        show_lines()
        return
    # Register the resolvers that Hydra's own config uses, such as ${now:}.
    setup_globals()
    instance = HydraConfig.instance()
    instance.cfg = hydra_cfg  # type: ignore[assignment]  # Hydra itself assigns it so
    logging_cfg = hydra_cfg.hydra.get("job_logging")
    if logging_cfg is not None:
        settings = OmegaConf.to_container(logging_cfg, resolve=True)
        assert isinstance(settings, dict)
        logging.config.dictConfig({str(key): value for key, value in settings.items()})
    drop_lines_on_full_disk()
    shorten_lines()
    show_lines()


def drop_lines_on_full_disk() -> None:
    """Make log files drop lines that a full disk does not accept. Otherwise logging prints a
    traceback for each dropped line on the screen, which shows the line anyway."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            setattr(handler, "handleError", partial(_ignore_os_error, handler))  # noqa: B010


def _ignore_os_error(handler: logging.Handler, record: logging.LogRecord) -> None:
    if not isinstance(sys.exc_info()[1], OSError):
        type(handler).handleError(handler, record)


def shorten_lines() -> None:
    """Replace Hydra's default log format with ours. A project's own format stays."""
    for handler in log_handlers():
        if format_of(handler) in _HYDRAS_FORMATS:
            handler.setFormatter(ShortLines())
