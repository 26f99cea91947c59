"""The log lines of a job: as Hydra sets them up, short on terminals, none lost to a full disk."""

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
from robust_train.host.screen import log_handlers, never_blocking_output

HYDRAS_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"
_OF_SWEEPS = "[%(asctime)s][HYDRA] %(message)s"


@contextlib.contextmanager
def logged_to_screen() -> Iterator[None]:
    """Show the launcher's lines within the block, unless the program has set up logging itself."""
    with never_blocking_output():
        lose_lines_quietly()
        logger = logging.getLogger("robust_train")
        if logger.hasHandlers():
            yield
            return
        level, handler = logger.level, logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(HYDRAS_FORMAT))
        logger.addHandler(handler)
        shorten_lines_on_terminals()
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
            logging.basicConfig(
                level=logging.INFO, stream=sys.stdout, format=HYDRAS_FORMAT
            )
        shorten_lines_on_terminals()
        return
    setup_globals()  # the resolvers that Hydra's own config uses, ${now:} among them
    instance = HydraConfig.instance()
    instance.cfg = hydra_cfg  # type: ignore[assignment]  # as Hydra itself sets it
    logging_cfg = hydra_cfg.hydra.get("job_logging")
    if logging_cfg is not None:
        settings = OmegaConf.to_container(logging_cfg, resolve=True)
        assert isinstance(settings, dict)
        logging.config.dictConfig({str(key): value for key, value in settings.items()})
    lose_lines_quietly()
    shorten_lines_on_terminals()


def lose_lines_quietly() -> None:
    """Have log files drop lines that a full disk does not take: logging prints a traceback for each
    of them, on the screen, where the line itself is shown as well."""

    def drop(handler: logging.Handler, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            type(handler).handleError(handler, record)

    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            setattr(handler, "handleError", partial(drop, handler))  # noqa: B010


class _ShortLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(level)s%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        is_plain = record.levelno in (logging.INFO, logging.DEBUG)
        record.level = "" if is_plain else f"{record.levelname.lower()}: "
        return super().format(record)


def shorten_lines_on_terminals() -> None:
    """Have log lines in Hydra's own format begin with the time of day only, where people read.

    These are terminals and the cells of a notebook.
    """
    for handler in log_handlers():
        stream = handler.stream
        is_cell = type(stream).__module__.startswith("ipykernel.")
        is_read = is_cell or getattr(stream, "isatty", lambda: False)()
        if is_read and format_of(handler) in (HYDRAS_FORMAT, _OF_SWEEPS):
            handler.setFormatter(_ShortLines())
