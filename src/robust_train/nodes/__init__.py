"""One job on several machines: the launcher of node 0 leads, those of the others follow.

A job on one machine imports no more of this than :mod:`.place`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from robust_train.errors import ConfigError
from robust_train.nodes.place import place_of
from robust_train.settings import DeviceSettings, run_folder

if TYPE_CHECKING:
    from robust_train.execution.signals import SignalWatch
    from robust_train.nodes.leader import Leader
    from robust_train.runfolder.folder import RunFolder
    from robust_train.runfolder.summary import Summary


def leader_of(
    cfg: DictConfig, wanted: DeviceSettings, run_dir: Path, signals: SignalWatch, folder: RunFolder
) -> Leader | None:
    """Return the leader of a job on several nodes; ConfigError as :func:`place_of`."""
    if (place := place_of(cfg, os.environ)) is None:
        return None
    from robust_train.nodes.leader import Leader

    return Leader(cfg, place.nodes, wanted.wait_timeout_seconds, run_dir, signals, folder)


def follow(
    trainer: str | Callable[..., Any] | None,
    cfg: DictConfig,
    run_dir: str | Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Summary | None:
    """Follow another node's launcher, unless the job ``is_over``; None: it is this one's to run."""
    place = place_of(cfg, os.environ)
    if place is None or place.node == 0:
        return None
    from robust_train.nodes.connection import send_refusal
    from robust_train.nodes.follower import Follower

    try:
        follower = Follower(trainer, cfg, run_dir, place, is_over)
    except ConfigError as error:
        send_refusal(run_folder(run_dir, ""), place.node, str(error))
        raise
    return follower.run()
