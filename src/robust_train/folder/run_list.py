"""A user's runs: a directory of links to run folders, live and past."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from robust_train.folder.lock import (
    LOCK_FILE,
    Holder,
    is_alive,
    left_of,
    read_holder,
)
from robust_train.folder.state import STATE_FILE, RunState, read_state
from robust_train.host.linux import marked_processes
from robust_train.model.errors import NotDoneError
from robust_train.model.events import Json

log = logging.getLogger("robust_train")

VARIABLE = "ROBUST_TRAIN_STATE_DIR"
MOST_LINKS = 500
DIED, NO_ANSWER = "died", "does not answer"


class NoLiveRunError(NotDoneError):
    """There is no such run, or more than one. The message lists the live ones."""


class NothingAliveError(NoLiveRunError):
    """The user has no live run."""


@dataclass(frozen=True)
class KnownRun:
    """A run folder as it is now.

    Attributes:
        run_dir: the folder.
        alive: whether its lock is held, or its job was killed and a process of it is left.
        state: the content of ``state.json``; None if it cannot be read.
        holder: the content of ``lock``; None if it cannot be read.
    """

    run_dir: Path
    alive: bool
    state: RunState | None
    holder: Holder | None

    @property
    def id(self) -> str:
        """The job's id."""
        if self.state is None:
            return (
                self.run_dir.name if self.holder is None else self.holder.job
            )
        return self.state.id

    @property
    def pid(self) -> int | None:
        """The launcher's process id, on its host."""
        known = self.state or self.holder
        return None if known is None else known.pid

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this host."""
        known = self.state or self.holder
        return known is None or known.host == socket.gethostname()

    @property
    def is_orphaned(self) -> bool:
        """Whether it is alive without its launcher, which was killed."""
        return self.alive and self.holder is not None and self.holder.is_dead

    @property
    def is_stopped(self) -> bool:
        """Whether its launcher is known to be stopped (Ctrl-Z)."""
        process = None if self.holder is None else self.holder.process
        with contextlib.suppress(psutil.Error):
            return (
                process is not None
                and process.status() == psutil.STATUS_STOPPED
            )
        return False

    @property
    def status(self) -> str:
        """Name of the state, corrected by whether the lock is held."""
        last = "starting" if self.state is None else self.state.state
        if not self.alive:
            return (
                last
                if self.state is not None and self.state.is_final
                else DIED
            )
        if self.is_orphaned:
            return "stopping"  # the attempt saves its last checkpoint
        return NO_ANSWER if self.is_stopped else last

    @property
    def is_unfinished(self) -> bool:
        """Whether it has ended before it was complete."""
        return not self.alive and self.status != "completed"

    @property
    def why_died(self) -> str:
        """What ended a run that could not record its end."""
        state = self.state
        if (
            self.is_here
            and state is not None
            and state.updated < psutil.boot_time()
        ):
            return "the host went down"
        return "its processes were killed"

    def about(self) -> dict[str, Json]:
        """Return all that is known, for programs; ``last_state`` of a run that died."""
        status = self.status
        known: dict[str, Json] = {"id": self.id, "pid": self.pid}
        if self.state is not None:
            content = self.state.about().items()
            known = {
                k: v for k, v in content if v is not None or k == "waiting"
            }
            until = time.time() if self.alive else self.state.updated
            known["seconds_in_state"] = round(
                max(until - self.state.since, 0.0), 1
            )
            known["seconds"] = round(self.state.seconds(until), 1)
            if status == DIED:
                known["last_state"] = self.state.state
        return {
            **known,
            "run_dir": str(self.run_dir),
            "alive": self.alive,
            "state": status,
        }


def read_run(
    run_dir: Path,
    marked: Callable[[], Mapping[int, Sequence[int]]] = marked_processes,
) -> KnownRun | None:
    """Return the run in a folder; None if there never was one."""
    state, holder = read_state(run_dir), read_holder(run_dir)
    if state is None and not os.path.lexists(run_dir / LOCK_FILE):
        return None
    alive = is_alive(run_dir, has_ended=state is None or state.is_final)
    if (
        not alive
        and holder is not None
        and not (state is not None and state.is_final)
    ):
        alive = bool(left_of(holder, marked))
    return KnownRun(run_dir, alive, state, holder)


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of links to the user's run folders."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    home = Path(
        environ.get("HOME") or os.path.expanduser("~").lstrip("~") or "/"
    )
    return (
        Path(environ.get("XDG_STATE_HOME") or home / ".local/state")
        / "robust-train"
        / "runs"
    )


def register(run_dir: Path, token: str) -> None:
    """Put a run folder at the end of the list; drop entries beyond its length."""
    directory = state_directory()
    try:
        directory.mkdir(
            0o700,
            parents=True,
            exist_ok=True,
        )
        links = _links(directory)
        earlier = [name for name, to in links.items() if to == run_dir]
        others = {name: to for name, to in links.items() if to != run_dir}
        # first, or a command that looks now would miss a run that goes on
        (directory / f"{time.time_ns():020}-{token}").symlink_to(run_dir)
        for name in earlier + _surplus(others, MOST_LINKS - 1):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        log.info(
            "%s cannot be used (%s): commands find this run by its folder only; set %s to "
            "use another directory",
            directory,
            error.strerror,
            VARIABLE,
        )


def find_runs() -> list[KnownRun]:
    """Return the runs on the user's list whose folders can be found now, the oldest first."""
    links = _links(state_directory())
    marked = functools.cache(marked_processes)
    runs = [
        read_run(folder, marked) for folder in dict.fromkeys(links.values())
    ]
    return [run for run in runs if run is not None]


def find_live_runs() -> list[KnownRun]:
    """Return the user's live runs, the oldest first."""
    return [run for run in find_runs() if run.alive]


def choose_run(which: str | None, *, dead_too: bool = False) -> KnownRun:
    """Return the run that is meant.

    Args:
        which: a run's id, its folder or a path inside, its job's name, or the process id of its
            launcher or attempt; the only live one if None (on this host, if one is here).
        dead_too: an id or folder may be that of a run that has ended.

    Raises:
        NoLiveRunError: there is no such run, or more than one.
    """
    if which is None:
        alive = find_live_runs()
        here = [run for run in alive if run.is_here] or alive
        if not here:
            raise NothingAliveError(
                "no run of yours is alive on this machine; robust-train ps lists earlier ones"
            )
        if len(here) > 1:
            listed = f"name one: {_listed(here)}"
            raise NoLiveRunError(
                f"{len(here)} runs of yours are alive; {listed}"
            )
        return here[0]
    at_path = _run_at(Path(os.path.expanduser(which)))
    if at_path is not None and (at_path.alive or dead_too):
        return at_path
    known = find_runs()
    found = [
        run
        for run in known
        if (run.alive or dead_too) and _is_meant(run, which)
    ]
    found = [run for run in found if run.alive] or found[-1:]
    if len(found) == 1:
        return found[0]
    if found:
        listed = f"{_listed(found)}; name one by its id"
        raise NoLiveRunError(f"{which} means {len(found)} runs: {listed}")
    ended = (
        [at_path]
        if at_path
        else [run for run in known if _is_meant(run, which)]
    )
    if ended:
        last = ended[-1]
        goes_on = (
            f"; robust-train resume {last.id} goes on" * last.is_unfinished
        )
        raise NoLiveRunError(
            f"{which} is not alive: {last.id} {last.status}{goes_on}"
        )
    listed = _listed([run for run in known if run.alive])
    listed = f"alive are {listed}" if listed else "robust-train ps lists them"
    raise NoLiveRunError(
        f"{which}: no run of yours has that id, folder, name or pid; {listed}"
    )


def _run_at(path: Path) -> KnownRun | None:
    """Return the run whose folder is ``path`` or contains it."""
    path = path.absolute()
    if not os.path.lexists(path):
        return None
    for folder in [path] + list(path.parents):
        if any(
            os.path.isfile(folder / name) for name in (LOCK_FILE, STATE_FILE)
        ):
            return read_run(folder.resolve())
    return None


def _is_meant(run: KnownRun, which: str) -> bool:
    state = run.state
    if which.isdigit():
        attempt = None if state is None else state.attempt
        pids = (run.pid, None if attempt is None else attempt.pid)
        return run.alive and run.is_here and int(which) in pids
    return which == run.id or (
        state is not None and which in (state.name,) + state.earlier_ids
    )


def _listed(runs: list[KnownRun]) -> str:
    return ", ".join(f"{run.id} ({run.run_dir})" for run in runs)


def _links(directory: Path) -> dict[str, Path]:
    """Return names and targets of the links in the directory, the oldest first."""
    found = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            with contextlib.suppress(OSError):
                found[name] = Path(os.readlink(directory / name))
    return found


def _surplus(links: Mapping[str, Path], most: int) -> list[str]:
    """Return the entries to drop so that at most ``most`` stay.

    A folder that is missing may be on a disk that is not mounted yet, so it loses its entry only if
    the list is full. Then it goes before those that exist.
    """
    if len(links) <= most:
        return []
    missing = [name for name, to in links.items() if not os.path.lexists(to)]
    existing = [name for name in links if name not in missing]
    return (missing + existing)[: len(links) - most]
