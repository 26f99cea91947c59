"""The data-loader workers in a process tree, and whether they hold its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from robust_train.host.memory import resident_bytes

_OF_TORCH = "pt_data_worker"  # its own name for them, since 2.6
# how multiprocessing starts a process that is no fork
_STARTED = ("multiprocessing.spawn", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Workers:
    """The workers at one moment."""

    count: int = 0
    hold_most: bool = (
        False  # more memory of their own than all other processes of the tree
    )


def find_workers(pids: Sequence[int]) -> Workers:
    """Return the data-loader workers among the descendants of these processes.

    What torch has named so; of other libraries and older versions the processes of
    :mod:`multiprocessing` that have started none themselves.
    """
    tree: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            tree |= {one.pid: one for one in (root, *root.children(recursive=True))}
    started = {pid: one for pid, one in tree.items() if _is_started(one, tree)}
    parents = {_parent(one) for one in started.values()}
    named = {pid for pid, one in started.items() if _name(one) == _OF_TORCH}
    workers = named or started.keys() - parents
    if not workers:
        return Workers()
    theirs = sum(_own_bytes(tree[pid], shares=False) for pid in workers)
    others = (_own_bytes(one) for pid, one in tree.items() if pid not in workers)
    return Workers(len(workers), theirs > sum(others))


def _is_started(process: psutil.Process, tree: dict[int, psutil.Process]) -> bool:
    """Return whether multiprocessing has started it: a fork has its parent's command line."""
    parent = tree.get(_parent(process))
    if parent is None:
        return False
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return words == parent.cmdline() or any(
            name in word for word in words for name in _STARTED
        )
    return False


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return 0


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def _own_bytes(process: psutil.Process, *, shares: bool = True) -> int:
    """Return the bytes that are its own; ``shares``: with those that its forks have too."""
    with contextlib.suppress(psutil.Error):
        if shares:
            return resident_bytes(process)[1]
        return int(process.memory_full_info().uss)
    return 0
