"""A guest of torchrun, srun, PyTorchJob or Ray Train: this process is one rank of their job.

The engine owns rendezvous, restarts and dead machines; no child process is started and no GPU
chosen. Rank 0 keeps the run folder. A rank that fails leaves its failure in ``ranks/`` before it
ends, and rank 0 of the next start decides from all of them how the job goes on.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from robust_train.compat import when_cuda_starts
from robust_train.config.attempt import guest_config
from robust_train.config.checks import checked, hide_urls
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import TrainerRef, job_name_of, target_of
from robust_train.folder.state import Summary
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.host.engine import GuestRank
from robust_train.host.linux import shared_machine_environment, signal_at_parents_death
from robust_train.host.signals import SignalWatch
from robust_train.launcher.ending import ended
from robust_train.launcher.hydra_state import run_folder
from robust_train.launcher.inline import InlineExecutor, function_of, shield_workers
from robust_train.launcher.job import Job, Trainer
from robust_train.launcher.rank_failures import EarlierStart, RankFailures
from robust_train.launcher.request import request_for
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoDevice
from robust_train.model.events import Event, Failed
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry
from robust_train.policy.batch_search import size_to_begin_with
from robust_train.policy.decide import Offers, decide, first_attempt
from robust_train.queue.devices import Devices, name_for_trainer

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from robust_train.host.store_votes import StoreVotes

log = logging.getLogger("robust_train")

_CHANGES = re.compile(r"\$\{(now|robust_pid)\b|\$\{hydra[.:]job\.(id|num)\b")
"""What makes a run folder another one for each rank, or for each restart."""

_START_SECONDS = (
    1800.0  # for rank 0, which may wait for a disk or for the last start's processes
)
_POLL_SECONDS = 0.05


def run_as_guest(
    guest: GuestRank,
    trainer: Trainer | None,
    cfg: DictConfig,
    run_dir: str | Path | None = None,
    *,
    explain: Callable[[Summary], object] = lambda summary: None,
) -> Summary:
    """Run this rank's part of the job; return its summary.

    Raises:
        ConfigError: the config cannot be used by a rank, or rank 0 refuses to go on.
        JobInterrupted: a signal stopped this rank.
    """
    cfg = guest_config(cfg, guest.engine, guest.world_size)
    folder = _run_dir(guest, run_dir)
    os.environ.update({**shared_machine_environment(os.environ), **guest.environ})
    if guest.parent_ends_ranks and os.getppid() > 1:
        signal_at_parents_death(signal.SIGKILL)
    shield_workers()
    with ExitStack() as stack:
        party = Party(guest, stack)
        if guest.rank:
            return _follow(party, trainer, cfg, explain)
        refusal = "rank 0 has ended"
        try:
            summary = GuestJob(party, trainer, cfg, folder, explain).run()
            refusal = str(summary.reason)
            return summary
        except BaseException as error:
            refusal = str(error)
            raise
        finally:  # no rank waits for one that will not begin
            party.begin({"refusal": refusal})


class Party:
    """The ranks of one start of the job, which find each other in their rendezvous store."""

    def __init__(self, guest: GuestRank, stack: ExitStack) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from robust_train.host.store_votes import StoreVotes

        self.guest = guest
        self._store = PrefixStore("robust_train", _open_store(guest))
        self._votes: StoreVotes = stack.enter_context(
            StoreVotes(self._store, guest.rank, guest.world_size)
        )
        self._has_begun = False

    def begin(self, start: Mapping[str, object]) -> None:
        """Send all ranks how this start begins, as rank 0; the first call counts."""
        if not self._has_begun:
            self._has_begun = True
            self._store.set("start", json.dumps(start))

    def await_start(self) -> dict[str, Any]:
        """Return how this start begins; raises ConfigError if rank 0 refuses."""
        until = time.monotonic() + _START_SECONDS
        while not self._store.check(["start"]):
            if time.monotonic() > until:
                raise ConfigError(
                    f"rank 0 did not begin within {_START_SECONDS / 60:g} min"
                )
            time.sleep(_POLL_SECONDS)
        start: dict[str, Any] = json.loads(self._store.get("start"))
        if start.get("refusal") is not None:
            raise ConfigError(start["refusal"])
        return start

    def executor(self, trainer: Callable[..., Any]) -> InlineExecutor:
        """Return what runs this rank's part of an attempt."""
        return InlineExecutor(
            lambda: trainer,
            can_restart=False,
            rank=self.guest.rank,
            flags=self._votes,
            process_ends=True,
        )


def _open_store(guest: GuestRank) -> Store:
    """Return a store of this start alone, in which the trainer's process group is made as well.

    torchrun's own outlives its restarts with all that was written to it, also the addresses of
    ranks that have ended. So rank 0 opens another one, and names its port there.
    """
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        found: Store = next(rendezvous("env://", guest.rank, guest.world_size))[0]
        return found
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = TCPStore(host, port, is_master=False, wait_for_workers=False)
    key = f"robust_train/{guest.restarts}/port"
    if guest.rank == 0:
        store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        agent.set(key, str(store.port))
    else:
        port = int(agent.get(key))
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    os.environ["MASTER_PORT"] = str(store.port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return store


class GuestJob(Job):
    """The job as rank 0 of an engine keeps it: one attempt, decided after the last start."""

    def __init__(
        self,
        party: Party,
        trainer: Trainer | None,
        cfg: DictConfig,
        run_dir: Path,
        explain: Callable[[Summary], object],
    ) -> None:
        super().__init__(trainer, cfg, run_dir, explain=explain, runs_inline=True)
        self._party = party
        self._failures = RankFailures(self.run_dir)
        # each restart is a launch, and the policy counts them
        self.config = replace(self.config, max_launches=0)
        # the engine decides on devices and the number of ranks: no other has to be named than one
        # on which all ranks stay
        config = replace(
            self.config,
            device="cpu",
            auto_device=False,
            allow_cpu_fallback=False,
            wait_for_gpu=False,
            min_num_gpus=None,
        )
        self.policy = replace(self.policy, config=config)

    def _find_executor(self) -> InlineExecutor:
        function = function_of(self.trainer, self.trainer_ref)
        return self._party.executor(function)

    def _find_devices(self) -> Group:
        group = _own_gpu(self._party.guest, self.config)
        self.devices = _reserved(
            self.config, self.name, self.run_dir, self.sleep, group, self.folder.token
        )
        return group

    def _first(self, group: Group) -> Retry:
        """Return what was decided after the last start, and send it to the other ranks."""
        job, number = self.beginning.job, self._first_number
        spec = replace(first_attempt(self.policy, ()), gpus=group)
        spec, why = size_to_begin_with(self.policy, (), spec)
        first, is_fresh = Retry(spec, "start", why), False
        history = self._failures.history(job, group)
        if history:
            first, is_fresh = self._after(history, first)
        self._failures.begin(number, job, first.spec, is_fresh=is_fresh)
        self._party.begin(
            {
                "run_dir": str(self.run_dir),
                "number": number,
                "job": job,
                "checkpoint": self.checkpoint and str(self.checkpoint),
                "spec": asdict(replace(first.spec, gpus=())),
            }
        )
        return first

    def _after(
        self, history: tuple[EarlierStart, ...], first: Retry
    ) -> tuple[Retry, bool]:
        """Return what follows the last start, and whether the history begins there again."""
        guest, last = self._party.guest, history[-1]
        if last.was_stopped:
            return Retry(
                last.attempt.spec, "start", "goes on after a stop of all ranks"
            ), False
        attempts = tuple(one.attempt for one in history if not one.was_stopped)
        decision: Decision | None = decide(
            self.policy, attempts, Offers(last.attempt.spec.gpus)
        )
        while isinstance(decision, Retry) and decision.room is not None:
            decision = decision.otherwise  # no GPU is waited for
        if isinstance(decision, Retry):
            return replace(
                decision, reason=f"the last start failed: {decision.reason}"
            ), False
        why = "every remedy has failed" if decision is None else decision.reason
        failure = last.attempt.failure
        is_bug = failure is not None and failure.kind is FailureKind.BUG
        if guest.restarts and not (is_bug and last.code_has_changed()):
            raise ConfigError(
                f"{why}; nothing is started, because {guest.engine} has restarted the ranks by "
                "itself and what failed is unchanged"
            )
        return first, True

    def _decide(self, history: Sequence[Attempt]) -> Decision | None:
        failure = history[-1].failure
        if failure is None:
            return None
        if self.signals.received is not None:
            return GiveUp("interrupted", action="stopped")
        return GiveUp(
            f"{failure.message}; the next start in this run folder decides what follows"
        )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Failed):
            self._failures.leave(self._first_number, 0, event)
        super()._on_event(event)


def _follow(
    party: Party,
    trainer: Trainer | None,
    cfg: DictConfig,
    explain: Callable[[Summary], object],
) -> Summary:
    """Run another rank than the first, in the run folder that rank 0 names."""
    log.setLevel(
        logging.WARNING
    )  # the same lines of every rank would hide what differs
    start = party.await_start()
    run_dir, number, rank = (
        Path(start["run_dir"]),
        int(start["number"]),
        party.guest.rank,
    )
    hide_urls(cfg, {})
    config = replace(checked(cfg), isolation="none")
    trainer = trainer or target_of(config)
    ref = TrainerRef.of(trainer, inline=True)
    group = _own_gpu(party.guest, config)
    spec = AttemptSpec(**{**start["spec"], "gpus": group})
    request = request_for(
        spec,
        cfg,
        config,
        trainer=ref,
        device=name_for_trainer(group, os.environ, own_process=False),
        number=number,
        run_dir=run_dir,
        job=start["job"],
        checkpoint=start["checkpoint"] and Path(start["checkpoint"]),
        search_key="",
        longest_pause=0.0,
        has_live_status=False,
    )
    environ = {
        k: v for k, v in request.environ.items() if k not in request.of_first_rank
    }
    devices = _reserved(
        config, job_name_of(config, trainer), run_dir, time.sleep, group
    )
    signals, attempt = SignalWatch(), Attempt(number, spec)

    def take(event: Event) -> None:
        nonlocal attempt
        attempt = attempt.after(event)
        devices.on_event(event)
        if isinstance(event, Failed):
            RankFailures(run_dir).leave(number, rank, event)

    function = function_of(trainer, ref)
    try:
        with signals:
            process_exit = party.executor(function).run(
                replace(request, environ=environ), take, signals
            )
            signals.raise_if_received()
    finally:
        devices.release()
    attempt = ended(attempt, 0.0, log=request.log_file, stacks=request.stacks_file)
    failure = attempt.failure
    summary = Summary(
        "completed" if failure is None else "failed",
        run_dir,
        None if failure is None else f"rank {rank}: {failure.message}",
        attempt.result,
        attempts=(attempt,),
        error=process_exit.error,
    )
    if failure is not None:
        explain(summary)
    return summary


def _run_dir(guest: GuestRank, given: str | Path | None) -> Path:
    """Return the run folder, the same for all ranks and restarts; raises ConfigError if none is."""
    if given is not None:
        return run_folder(given, "")
    if HydraConfig.initialized():
        config: Any = HydraConfig.instance().cfg
        raw: Any = OmegaConf.to_container(config.hydra.run, resolve=False)
        if not _CHANGES.search(str(raw["dir"])):
            return run_folder(None, "")
    return run_folder(guest.folder, "")


def _own_gpu(guest: GuestRank, config: RobustConfig) -> Group:
    """Return the GPU that is this rank's by its local rank; none for the CPU."""
    if not config.auto_device and config.device == "cpu":
        return ()
    visible = visible_gpus(read_inventory(processes=False), os.environ)
    if not visible.gpus:
        if not config.allow_cpu_fallback:
            raise NoDevice(f"{visible.why_none}, and allow_cpu_fallback is false")
        log.info("%s: training on the CPU", visible.why_none)
        return ()
    import torch

    number = guest.local_rank % len(visible.gpus)
    # for trainers that say just "cuda"
    when_cuda_starts(torch, lambda: torch.cuda.set_device(number))
    return (visible.gpus[number],)


def _reserved(
    config: RobustConfig,
    name: str,
    run_dir: Path,
    sleep: Callable[[float], None],
    group: Group,
    token: str = "",
) -> Devices:
    """Record in the host's queue, where there is one, that this rank uses its GPU."""
    config = replace(
        config,
        device=group[0].uuid if group else "cpu",
        auto_device=False,
        num_gpus=1,
        wait_for_gpu=False,
        allow_cpu_fallback=False,
    )
    devices = Devices(config, name, os.environ, run_dir, sleep, token=token)
    try:
        devices.acquire()
    except (ConfigError, NoDevice) as error:
        log.warning("%s is used without a reservation: %s", config.device, error)
    return devices
