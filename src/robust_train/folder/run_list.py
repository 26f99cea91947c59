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
    """No such run exists, or several do. The message lists the live runs."""


class NothingAliveError(NoLiveRunError):
    """The user has no live run."""


@dataclass(frozen=True)
class KnownRun:
    """A run folder as it is now.

    Attributes:
        run_dir: the folder.
        alive: whether its lock is held, or a process of its killed job is left.
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
        """Return whether an id of it begins so, or is the short form of this."""
        if self.state is None or len(which) < _LEAST_DIGITS:
            return False
        ids = (self.id, self.state.job or "") + self.state.earlier_ids
        return any(id.startswith(which) or which.startswith(id) for id in ids if id)

    def is_of(self, directory: str) -> bool:
        """Return whether it was started in this directory, or the directory lies in its folder."""
        started_in = None if self.state is None else self.state.working_directory
        return started_in == directory or Path(directory).is_relative_to(self.run_dir)

    @property
    def live_pids(self) -> tuple[int, ...]:
        """The process ids of a live launcher and its attempt, if they are this host's."""
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
        """Whether it is alive without its launcher, which was killed."""
        return self.alive and self.holder is not None and self.holder.is_dead

    @property
    def is_stopped(self) -> bool:
        """Whether its launcher is known to be stopped (Ctrl-Z)."""
        process = None if self.holder is None else self.holder.process
        with contextlib.suppress(psutil.Error):
            return process is not None and process.status() == psutil.STATUS_STOPPED
        return False

    @property
    def status(self) -> str:
        """Name of the state, corrected by whether the lock is held."""
        last = "starting" if self.state is None else self.state.state
        if not self.alive:
            return last if self.state is not None and self.state.is_final else DIED
        if self.is_orphaned:
            return "stopping"  # the attempt saves its last checkpoint
        return NO_ANSWER if self.is_stopped else last

    @property
    def is_unfinished(self) -> bool:
        """Whether it has ended before it was complete."""
        return not self.alive and self.status != "completed"

    @property
    def why_died(self) -> str:
        """The reason why a run ended that could not record its end."""
        state = self.state
        if self.is_here and state is not None and state.updated < psutil.boot_time():
            return "the host went down"
        return "its processes were killed"

    def about(self) -> dict[str, Json]:
        """Return all that is known, for programs, with the ``last_state`` of a run that died."""
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
            # an account without an entry leaves the tilde as it is
            home = os.path.expanduser("~").lstrip("~")
        states = os.path.join(home or "/", ".local/state")
    return Path(states) / "robust-train" / "runs"


def register(run_dir: Path, token: str) -> None:
    """Put a run folder at the end of the list, and drop entries beyond its length."""
    directory = state_directory()
    try:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        links = _links(directory)
        earlier = [name for name, to in links.items() if to == run_dir]
        others = {name: to for name, to in links.items() if to != run_dir}
        # first, or a command that looks now would miss a run that continues
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
    """Return the sweep folder that is named by its path, or by the path of a file in it, or
    None."""
    if which is None:
        return None
    path = Path(os.path.expanduser(which)).resolve()
    folder = path.parent if os.path.isfile(path) else path
    return folder if os.path.isfile(folder / SWEEP_FILE) else None


def choose_run(which: str | None, *, dead_too: bool = False, command: str = "status") -> KnownRun:
    """Return the run that the user means, by the same rules in every command.

    Args:
        which: a run's id or the first digits of it, its folder, a path inside or around it, its
            job's name, or the process id of its launcher or attempt. None: the only live run, else
            the last of this working directory.
        dead_too: accept a run that has ended.
        command: the words that a refusal proposes.

    Raises:
        NothingAliveError: the run is not alive.
        NoLiveRunError: no such run exists, or several do.
    """
    if which is None:
        run = _default_run(command)
        if run.alive or dead_too:
            return run
        raise NothingAliveError(
            f"no run of yours is alive on this machine; the last of this directory is "
            f"{run.id}, {run.status}{_goes_on(run)}"
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
        raise NoLiveRunError(f"{which} is not alive: {last.id} {last.status}{_goes_on(last)}")
    alive = [run for run in runs if run.alive]
    hint = "robust-train ps lists them"
    if alive:
        hint = f"alive are:{_listed(alive, command)}"
    raise NoLiveRunError(f"{which}: no run of yours has that id, folder, name or pid; {hint}")


def _default_run(command: str) -> KnownRun:
    """Return the run that a command means which names none."""
    runs = find_runs()
    alive = [run for run in runs if run.alive]
    # a disk may be shared with other hosts
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
            "no run of yours is alive, and none was started in this directory; the last "
            f"ones elsewhere:{listed}"
        )
    raise NothingAliveError(
        f"no run of yours is alive, and none is on the list in {state_directory()}"
    )


def _goes_on(run: KnownRun) -> str:
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
    """Return the runs with this pid, else those with this id or name, else those with an id that
    begins so, else those in this folder, as a sweep's are."""
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
    """Return a line for each run with the command that means it."""
    rows = [
        (
            f"robust-train {command} {run.id}",
            run.status,
            None if run.state is None else run.state.name,
            run.run_dir,
        )
        for run in runs
    ]
    return "".join(f"\n  {line}" for line in align_columns(rows, _COLUMNS)[1:])


def _links(directory: Path) -> dict[str, Path]:
    """Return names and targets of the links in the directory, the oldest first."""
    links = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            with contextlib.suppress(OSError):
                links[name] = Path(os.readlink(directory / name))
    return links


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
