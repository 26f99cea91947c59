"""One of several processes that run a trainer together, from the inside."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from robust_train.events import Event
from robust_train.execution.child import run_attempt, stop_on_sigterm
from robust_train.execution.output import flush_output
from robust_train.execution.prctl import signal_at_parents_death
from robust_train.execution.request import AttemptRequest
from robust_train.execution.stall import DUMP_STACKS
from robust_train.execution.votes import Votes
from robust_train.run import Report, Run
from robust_train.runfolder.attempt_requests import AttemptRequests

_EVENTS_OF_ANY_RANK = frozenset(
    {"memory", "out_of_memory", "micro_batch_changed", "micro_batch_exhausted"}
)
"""What the launcher hears of other ranks than the first, with their number."""


@dataclass(frozen=True)
class Rank:
    """What a rank's process is given; it travels by fork.

    Attributes:
        request: the attempt.
        trainer: None where it has to be imported first.
        report: takes the attempt's events.
        votes: the group's flags.
        accounts: a descriptor of a file in memory for each rank's account of its end.
    """

    request: AttemptRequest
    trainer: Callable[..., Any] | None
    report: Callable[[dict[str, Any]], None]
    votes: Votes
    accounts: tuple[int, ...]


def be_rank(given: Rank) -> None:
    """Run the trainer as the rank that the elastic agent's variables name.

    Returns when it has completed; otherwise the process ends here.
    """
    rank = int(os.environ["RANK"])
    request = given.request
    completed = False
    try:
        signal_at_parents_death(signal.SIGKILL)
        run = Run(
            run_dir=Path(request.run_dir),
            attempt=request.attempt,
            resume_checkpoint=request.resume_checkpoint,
            report=_report_of(rank, given.report),
            rank=rank,
            world_size=request.ranks,
            flags=given.votes,
        )
        stop_on_sigterm(run)
        _settle(rank, request)
        request = replace(request, cfg=_config_of(rank, request.cfg))
        trainer = given.trainer or request.trainer.load()[1]
        with AttemptRequests(run, run.run_dir):
            error = run_attempt(request, trainer, run, _account_to(given.accounts[rank], run))
        completed = error is None
        # from here on others may still be at work, and a wish to stop is theirs to hear
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_output()
        if not completed:
            # not the interpreter's way out: a collective's thread may wait for peers there
            os._exit(1)


def read_account(descriptor: int) -> tuple[float, dict[str, Any]] | None:
    """When and how a rank has ended by its own account; None where it gave none."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        account: dict[str, Any] = json.loads(data)
    except ValueError:
        return None
    return account.pop("at"), account


def _account_to(descriptor: int, run: Run) -> Callable[[dict[str, Any]], None]:
    def report(event: dict[str, Any]) -> None:
        account = {**event, "at": time.monotonic()}
        os.pwrite(descriptor, json.dumps(account, default=repr).encode(), 0)

    return report


def _report_of(rank: int, report: Callable[[dict[str, Any]], None]) -> Report:
    def of_first(event: Event) -> None:
        report(event.as_json())

    if rank == 0:
        return of_first

    def of_another(event: Event) -> None:
        if event.name in _EVENTS_OF_ANY_RANK:
            report({**event.as_json(), "rank": rank})

    return of_another


def _config_of(rank: int, cfg: DictConfig) -> DictConfig:
    cfg = cfg.copy()
    with open_dict(cfg):
        if str(cfg.device).startswith("cuda"):
            cfg.device = f"cuda:{rank}"
        if rank:
            # one record of memory over time, in one file
            cfg.memory.sample_interval_ms = 0
    return cfg


def _settle(rank: int, request: AttemptRequest) -> None:
    """What each of several processes of one machine needs."""
    if rank:
        # the same lines of every rank would hide what differs
        for handler in logging.getLogger().handlers:
            handler.addFilter(lambda record: _mark(rank, record))
    if request.stall_timeout_seconds > 0:
        faulthandler.register(DUMP_STACKS, file=request.stacks_file.open("a"))
    # all ranks are on this host: no look-up of its name, which may have no address
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch = sys.modules["torch"]
    if str(request.cfg.device).startswith("cuda"):
        # for trainers that say just "cuda"; takes effect when CUDA starts
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(rank))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // request.ranks))


def _mark(rank: int, record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
        return False
    if not getattr(record, "is_marked", False):
        record.msg, record.is_marked = f"[rank {rank}] {record.msg}", True
    return True
