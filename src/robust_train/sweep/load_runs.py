"""``robust_train.load_runs``: one row a run, for notebooks and tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.files import parse_json
from robust_train.folder.run_list import read_run
from robust_train.folder.state import Summary, read_summary
from robust_train.model.events import Json
from robust_train.sweep.record import job_folders, read_record


class Runs(list[dict[str, Json]]):
    """Rows, one a run, as dictionaries."""

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; nested keys have columns like ``config.training.lr``."""
        import pandas

        return pandas.json_normalize(list(self))


def load_runs(folder: str | Path) -> Runs:
    """Return a row for each run in ``folder``: a run folder, a sweep's, or any that holds some.

    Each has ``run_dir``, ``name``, ``status``, ``reason``, ``result``, ``wall_seconds``,
    ``wait_seconds``, ``config`` (as Hydra saved it; empty without Hydra), ``attempts`` (as
    ``summary.json`` has them), ``job``, ``trial``, ``overrides`` and ``params`` of a sweep's job
    (its number, that of what was tried, which ``repeat`` jobs share, and what it varies, as words
    and as values), and ``samples_per_second`` over the whole of all attempts, None if unknown.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    rows = (_row(one) for one in sorted(set(_run_folders(folder))))
    return Runs(row for row in rows if row is not None)


def _run_folders(folder: Path) -> Iterator[Path]:
    if (folder / "summary.json").exists() or (folder / "state.json").exists():
        yield folder
        return
    yield from job_folders(folder)
    # launch() without Hydra leaves no ``.hydra``
    for path in folder.glob("**/state.json"):
        parts = path.relative_to(folder).parts
        # what a run has moved aside is not the folder's any more
        if not any(part.startswith("earlier-") for part in parts):
            yield path.parent


def _row(folder: Path) -> dict[str, Json] | None:
    run, summary = read_run(folder), read_summary(folder)
    if run is not None and (run.alive or summary is None):
        summary = Summary(run.status)  # not that of the launch before
    if summary is None:
        return None
    job = read_record(folder)
    overrides = job.overrides if job else ()
    shown = (
        "status",
        "reason",
        "result",
        "wall_seconds",
        "wait_seconds",
        "attempts",
    )
    content = {**summary.as_json(), "result": summary.result}
    return {
        "run_dir": str(folder),
        "name": folder.name
        if run is None or run.state is None
        else run.state.name,
        **{name: content[name] for name in shown},
        "samples_per_second": _speed(summary),
        "job": job and job.job,
        "trial": job and job.trial,
        "overrides": list(overrides),
        "params": dict(map(_param, overrides)),
        "config": _config(folder),
    }


def _param(override: str) -> tuple[str, Json]:
    """Return a key that the sweep has set, and its value."""
    key, _, value = override.lstrip("+").partition("=")
    with contextlib.suppress(ValueError):
        return key, parse_json(value)
    return key, value


def _speed(summary: Summary) -> float | None:
    samples = sum(
        (one.end_step - one.start_step) * one.spec.effective_batch_size
        for one in summary.attempts
        if one.end_step is not None and one.spec.has_batch
    )
    seconds = sum(one.seconds or 0.0 for one in summary.attempts)
    return samples / seconds if samples > 0 and seconds > 0 else None


def _config(folder: Path) -> Json:
    # what is wrong with it costs the config
    with contextlib.suppress(Exception):
        cfg = OmegaConf.load(folder / ".hydra" / "config.yaml")
        try:
            return OmegaConf.to_container(cfg, resolve=True)
        # an interpolation that only holds in the job
        except OmegaConfBaseException:
            return OmegaConf.to_container(cfg)
    return {}
