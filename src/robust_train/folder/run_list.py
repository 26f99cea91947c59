"""Lists a user's runs, and finds the run that a command means.

Each launcher adds a link to its run folder to a directory of the user. Commands read these links to
list the runs, and to find a run by its id, name, folder or process id.
"""

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

from robust_train.folder.identity import read_identity, shown_id
from robust_train.folder.lock import LOCK_FILE, Holder, is_alive, left_of, read_holder
from robust_train.folder.requests import SWEEP_FILE
from robust_train.folder.state import STATE_FILE, RunState, read_state
from robust_train.host.linux import marked_processes
from robust_train.model.errors import ConfigError, NotDoneError
from robust_train.model.events import Json
from robust_train.readable import align_columns

log = logging.getLogger("robust_train")

VARIABLE = "ROBUST_TRAIN_STATE_DIR"
MOST_LINKS = 500
DIED = "died"
NO_ANSWER = "does not answer"
_LEAST_DIGITS = 4
_MOST_LISTED = 5
_COLUMNS = ("command", "state", "job", "run folder")


class NoLiveRunError(NotDoneError):
    """No run, or more than one run, matches the name. The message lists the live runs."""


class NothingAliveError(NoLiveRunError):
    """The user has no live run."""


@dataclass(frozen=True)
class KnownRun:
    """The current state of a run folder.

    Attributes:
        run_dir: the folder.
        alive: whether its lock is held, or a process of its killed job still lives.
        state: the content of ``state.json``, or None if it cannot be read.
        holder: the content of ``lock``, or None if it cannot be read.
    """

    run_dir: Path
    alive: bool
    state: RunState | None
    holder: Holder | None

    @property
    def id(self) -> str:
        """The job's id."""
        if self.state is not None:
            return self.state.id
        job = None
        with contextlib.suppress(OSError, ConfigError):
            job = read_identity(self.run_dir)
        return self.run_dir.name if job is None else shown_id(job.id)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the run: its id, the ids of earlier jobs in its folder, its job's name."""
        if self.state is None:
            return (self.id,)
        return (self.id, self.state.name) + self.state.earlier_ids

    def has_id_like(self, which: str) -> bool:
        """Return whether an id of the run starts with ``which``, or is the start of ``which``."""
        if self.state is None or len(which) < _LEAST_DIGITS:
            return False
        ids = (self.id, self.state.job or "") + self.state.earlier_ids
        return any(id.startswith(which) or which.startswith(id) for id in ids if id)

    def is_of(self, directory: str) -> bool:
        """Return whether the run was started in a directory, or its folder contains it."""
        if self.state is not None and self.state.working_directory == directory:
            return True
        return Path(directory).is_relative_to(self.run_dir)

    @property
    def live_pids(self) -> tuple[int, ...]:
        """The process ids of a live launcher and its attempt, if they run on this host."""
        if not (self.alive and self.is_here):
            return ()
        pids = [self.pid]
        if self.state is not None and self.state.attempt is not None:
            pids.append(self.state.attempt.pid)
        return tuple(pid for pid in pids if pid is not None)

    @property
    def pid(self) -> int | None:
        """The launcher's process id, on its host."""
        source = self.state or self.holder
        return None if source is None else source.pid

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this host."""
        source = self.state or self.holder
        return source is None or source.host == socket.gethostname()

    @property
    def is_orphaned(self) -> bool:
        """Whether its attempt is alive although its launcher was killed."""
        return self.alive and self.holder is not None and self.holder.is_dead

    @property
    def is_stopped(self) -> bool:
        """Whether its launcher is known to be suspended (Ctrl-Z)."""
        process = None if self.holder is None else self.holder.process
        with contextlib.suppress(psutil.Error):
            return process is not None and process.status() == psutil.STATUS_STOPPED
        return False

    @property
    def status(self) -> str:
        """The name of the run's state, which takes into account whether the run is alive."""
        if not self.alive:
            if self.state is not None and self.state.is_final:
                return self.state.state
            return DIED
        if self.is_orphaned:
            return "stopping"  # the attempt saves its last checkpoint
        if self.is_stopped:
            return NO_ANSWER
        return "starting" if self.state is None else self.state.state

    @property
    def is_unfinished(self) -> bool:
        """Whether it has ended without completing."""
        return not self.alive and self.status != "completed"

    @property
    def why_died(self) -> str:
        """Why a run ended without recording its end."""
        state = self.state
        if self.is_here and state is not None and state.updated < psutil.boot_time():
            return "the host went down"
        return "its processes were killed"

    def about(self) -> dict[str, Json]:
        """Return all facts about the run for programs, with the ``last_state`` if it died."""
        status = self.status
        facts: dict[str, Json] = {"id": self.id, "pid": self.pid}
        if self.state is not None:
            content = self.state.about().items()
            facts = {k: v for k, v in content if v is not None or k == "waiting"}
            until = time.time() if self.alive else self.state.updated
            facts["seconds_in_state"] = round(max(until - self.state.since, 0.0), 1)
            facts["seconds"] = round(self.state.seconds(until), 1)
            if status == DIED:
                facts["last_state"] = self.state.state
        return {**facts, "run_dir": str(self.run_dir), "alive": self.alive, "state": status}


def read_run(
    run_dir: Path, marked: Callable[[], Mapping[int, Sequence[int]]] = marked_processes
) -> KnownRun | None:
    """Return the run in a folder, or None if it never had a run."""
    state = read_state(run_dir)
    holder = read_holder(run_dir)
    if state is None and not os.path.lexists(run_dir / LOCK_FILE):
        return None
    alive = is_alive(run_dir, has_ended=state is None or state.is_final)
    if not alive and holder is not None and not (state is not None and state.is_final):
        alive = bool(left_of(holder, marked))
    return KnownRun(run_dir, alive, state, holder)


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of links to the user's run folders."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    states = environ.get("XDG_STATE_HOME")
    if not states:
        home = environ.get("HOME")
        if not home:
            # `expanduser` leaves the tilde for a user without an entry in the user database.
            home = os.path.expanduser("~").lstrip("~")
        states = os.path.join(home or "/", ".local/state")
    return Path(states) / "robust-train" / "runs"


def register(run_dir: Path, token: str) -> None:
    """Add a run folder to the end of the list, and drop the oldest entries of a full list."""
    directory = state_directory()
    try:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        links = _links(directory)
        earlier = [name for name, to in links.items() if to == run_dir]
        others = {name: to for name, to in links.items() if to != run_dir}
        # The new link is created first. Otherwise a command could miss a run that resumes now.
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
    runs = [read_run(folder, marked) for folder in dict.fromkeys(links.values())]
    return [run for run in runs if run is not None]


def find_live_runs() -> list[KnownRun]:
    """Return the user's live runs, the oldest first."""
    return [run for run in find_runs() if run.alive]


def sweep_at(which: str | None) -> Path | None:
    """Return the sweep folder at a path, or around the file at a path, or None."""
    if which is None:
        return None
    path = Path(os.path.expanduser(which)).resolve()
    folder = path.parent if os.path.isfile(path) else path
    return folder if os.path.isfile(folder / SWEEP_FILE) else None


def choose_run(which: str | None, *, dead_too: bool = False, command: str = "status") -> KnownRun:
    """Return the run that the user means, by the same rules in every command.

    Args:
        which: a run's id or the first digits of it, its folder, a path inside or around it, its
            job's name, or the process id of its launcher or attempt. None for the only live run, or
            the last run of this working directory.
        dead_too: whether to accept a run that has ended.
        command: the command that an error message suggests.

    Raises:
        NothingAliveError: the run is not alive.
        NoLiveRunError: no run, or more than one run, matches ``which``.
    """
    if which is None:
        run = _default_run(command)
        if run.alive or dead_too:
            return run
        raise NothingAliveError(
            f"no run of yours is alive on this machine; the last run of this directory is "
            f"{run.id}, {run.status}{_hint_to_resume(run)}"
        )
    at_path = _run_at(Path(os.path.expanduser(which)))
    if at_path is not None and (at_path.alive or dead_too):
        return at_path
    runs = find_runs()
    meant = [at_path] if at_path is not None else _meant(runs, which)
    chosen = [run for run in meant if run.alive]
    if not chosen and dead_too:
        chosen = meant[-1:]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise NoLiveRunError(
            f"{which} means {len(chosen)} runs; name one:{_listed(chosen, command)}"
        )
    if meant:
        last = meant[-1]
        hint = _hint_to_resume(last)
        raise NoLiveRunError(f"{which} is not alive: {last.id} {last.status}{hint}")
    alive = [run for run in runs if run.alive]
    hint = "robust-train ps lists your runs"
    if alive:
        hint = f"live runs:{_listed(alive, command)}"
    raise NoLiveRunError(f"{which}: no run of yours has that id, folder, name or pid; {hint}")


def _default_run(command: str) -> KnownRun:
    """Return the run of a command that names no run."""
    runs = find_runs()
    alive = [run for run in runs if run.alive]
    # The list may be on a disk that other hosts share. Runs of this host are preferred.
    alive = [run for run in alive if run.is_here] or alive
    if len(alive) == 1:
        return alive[0]
    here = os.getcwd()
    of_directory = [run for run in runs if run.is_of(here)]
    alive_here = [run for run in alive if run in of_directory]
    if len(alive_here) == 1:
        return alive_here[0]
    if of_directory and not alive_here:
        return of_directory[-1]
    if alive:
        listed = _listed(alive_here or alive, command)
        raise NoLiveRunError(
            f"{len(alive_here or alive)} runs of yours are alive; name one:{listed}"
        )
    if runs:
        listed = _listed(runs[-_MOST_LISTED:], command)
        raise NothingAliveError(
            "no run of yours is alive, and no run was started in this directory; the last "
            f"runs elsewhere:{listed}"
        )
    raise NothingAliveError(
        f"no run of yours is alive, and the list of runs in {state_directory()} is empty"
    )


def _hint_to_resume(run: KnownRun) -> str:
    if not run.is_unfinished:
        return ""
    return f"; robust-train resume {run.id} continues"


def _run_at(path: Path) -> KnownRun | None:
    """Return the run whose folder is ``path`` or contains it."""
    path = path.absolute()
    if not os.path.lexists(path):
        return None
    for folder in [path] + list(path.parents):
        if os.path.isfile(folder / SWEEP_FILE):  # it has a lock as well
            return None
        if any(os.path.isfile(folder / name) for name in (LOCK_FILE, STATE_FILE)):
            return read_run(folder.resolve())
    return None


def _meant(runs: Sequence[KnownRun], which: str) -> list[KnownRun]:
    """Return the runs that ``which`` means.

    These are the runs with this process id, or else with this id or name, or else with an id that
    starts like this, or else in this folder, for example the folder of a sweep.
    """
    folder = Path(os.path.expanduser(which)).resolve()
    ways: tuple[Callable[[KnownRun], bool], ...] = (
        lambda run: which.isdigit() and int(which) in run.live_pids,
        lambda run: which in run.names,
        lambda run: run.has_id_like(which),
        lambda run: folder in run.run_dir.parents,
    )
    for is_meant in ways:
        meant = [run for run in runs if is_meant(run)]
        if meant:
            return meant
    return []


def _listed(runs: Sequence[KnownRun], command: str) -> str:
    """Return a line for each run, with the command for this run."""
    rows = []
    for run in runs:
        name = None if run.state is None else run.state.name
        rows.append((f"robust-train {command} {run.id}", run.status, name, run.run_dir))
    return "".join(f"\n  {line}" for line in align_columns(rows, _COLUMNS)[1:])


def _links(directory: Path) -> dict[str, Path]:
    """Return the names and targets of the links in a directory, the oldest first."""
    links = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            with contextlib.suppress(OSError):
                links[name] = Path(os.readlink(directory / name))
    return links


def _surplus(links: Mapping[str, Path], most: int) -> list[str]:
    """Return the entries to drop so that at most ``most`` stay.

    A missing folder may be on a disk that is not mounted yet, so its entry is dropped only if the
    list is full. Entries of missing folders are dropped before entries of existing folders.
    """
    if len(links) <= most:
        return []
    missing = [name for name, to in links.items() if not os.path.lexists(to)]
    existing = [name for name in links if name not in missing]
    return (missing + existing)[: len(links) - most]
