"""Runs a job as a guest of torchrun, srun, PyTorchJob or Ray Train: this process is one rank.

``entry.launch`` creates a :class:`RankDriver` in each rank's process. The engine handles
rendezvous, restarts and dead machines, so the guest starts no child process and chooses no GPU.
Rank 0 keeps the run folder and sends its decisions to the other ranks through a store. A rank that
fails leaves its failure in ``ranks/`` (:mod:`.rank_failures`) before it ends. After the engine has
restarted the ranks, rank 0 decides from those files how the job resumes.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from robust_train.compat import when_cuda_starts
from robust_train.config.attempt import AttemptRequest, guest_config
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import Trainer
from robust_train.folder.hydra_state import changes_each_time, run_folder
from robust_train.folder.identity import Beginning
from robust_train.folder.resolvers import resolvers_of
from robust_train.folder.state import RunState, Summary
from robust_train.host.engine import TORCHRUN, GuestRank
from robust_train.host.linux import shared_machine_environment, signal_at_parents_death
from robust_train.host.signals import SignalWatch
from robust_train.host.store_votes import StoreVotes
from robust_train.launcher.driver import Driver
from robust_train.launcher.ending import add_ending
from robust_train.launcher.inline import InlineExecutor, load_trainer, shield_workers
from robust_train.launcher.plan import Plan, plan_job
from robust_train.launcher.rank_failures import EarlierStart, RankFailures
from robust_train.launcher.request import build_request
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoDeviceError
from robust_train.model.events import Event, Failed
from robust_train.model.failure import FailureKind
from robust_train.model.feature import Feature
from robust_train.model.gpu import Group
from robust_train.model.spec import AttemptSpec, Decision, GiveUp, Retry
from robust_train.policy.context import Offers
from robust_train.policy.decide import Remedies, decide, first_attempt, share_among
from robust_train.policy.first_size import choose_first_size
from robust_train.policy.settings import PolicySettings
from robust_train.queue.devices import Devices
from robust_train.queue.waiting import WaitStatus

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("robust_train")

# How long the other ranks wait for rank 0, which may wait for a disk or for the processes of the
# last start.
_START_SECONDS = 1800.0
_POLL_SECONDS = 0.05


class RankDriver(Driver):
    """Runs one rank of an engine's job. Rank 0 also is the driver of a :class:`.job.Job`.

    Args:
        guest: this process's rank, and its engine.
        trainer: the trainer, None if the config names it.
        cfg: the composed config.
        run_dir: the run folder, None if Hydra or the engine chooses it.
        features: the features that take part in the job.
        remedies: the remedies to try after a failure.

    Raises:
        ConfigError: the config cannot be used by a rank.
    """

    has_remedies = False  # because the engine restarts the ranks
    chooses_devices = False

    def __init__(
        self,
        guest: GuestRank,
        trainer: Trainer | None,
        cfg: DictConfig,
        run_dir: str | Path | None,
        features: tuple[Feature, ...],
        remedies: Remedies,
    ) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.guest = guest
        cfg = guest_config(cfg, guest.engine, guest.world_size)
        folder = _run_dir(guest, run_dir)
        os.environ.update({**shared_machine_environment(os.environ), **guest.environ})
        if guest.engine == TORCHRUN and os.getppid() > 1:
            # A rank ends with the agent that started it.
            signal_at_parents_death(signal.SIGKILL)
        shield_workers()
        self.plan = plan = plan_job(
            trainer, cfg, folder, features=features, remedies=remedies, guest=True
        )
        self._store = PrefixStore("robust_train", _open_store(guest))
        self._has_published = False
        self.votes = StoreVotes(self._store, guest.rank, guest.world_size)
        self.devices = RankDevices(guest, plan.config, plan.name, plan.run_dir)

        @functools.cache
        def load_once() -> Callable[..., Any]:
            return load_trainer(plan.trainer, plan.trainer_ref)

        def record_failure(request: AttemptRequest, event: Failed) -> None:
            RankFailures(request.run_dir).record_failure(request.attempt, guest.rank, event)

        self.executor = InlineExecutor(
            load_once, rank=guest.rank, flags=self.votes, on_failure=record_failure
        )

    def run_part(
        self, run_rank_0: Callable[[], Summary], explain: Callable[[Summary], object]
    ) -> Summary:
        """Run this rank's part of the job and return its summary.

        Args:
            run_rank_0: runs the job; only rank 0 calls it.
            explain: called with the summary if this rank is not rank 0 and has failed.

        Raises:
            ConfigError: rank 0 refuses to continue.
            JobInterrupted: a signal stopped this rank.
        """
        with self.votes:
            if self.guest.rank != 0:
                return self._follow(explain)
            refusal = "rank 0 has ended"
            try:
                summary = run_rank_0()
                refusal = str(summary.reason)
                return summary
            except BaseException as error:
                refusal = str(error)
                raise
            finally:
                # If rank 0 ended before it published a start, the other ranks must not wait.
                self._publish({"refusal": refusal})

    # --- the driver of rank 0's job ---

    def open(
        self,
        signals: SignalWatch,
        job_id: str,
        token: str,
        sleep: Callable[[float], None],
        on_wait: Callable[[WaitStatus], None],
    ) -> None:
        """Do nothing: the engine started this process on its GPU."""

    def wait_for_room(
        self, retry: Retry, policy: PolicySettings, history: tuple[Attempt, ...]
    ) -> Retry | str:
        """Return the retry at once, because the engine chose the GPUs."""
        return retry

    def decide(self, policy: PolicySettings, history: tuple[Attempt, ...]) -> Decision:
        """Give up: the engine restarts the ranks, and the next start decides."""
        failure = history[-1].failure
        assert failure is not None, "a completed attempt needs no decision"
        hint = "the next start in this run folder decides how the job resumes"
        return GiveUp(f"{failure.message}; {hint}")

    def how_to_resume(self, plan: Plan, state: RunState) -> str:
        """Return the action that resumes the job."""
        return "start all ranks again, with the same run folder"

    def _publish(self, start: Mapping[str, object]) -> None:
        """Send this start to the other ranks. Only rank 0 calls it, and its first call counts."""
        if not self._has_published:
            self._has_published = True
            self._store.set("start", json.dumps(start))

    def decide_first(self, beginning: Beginning, policy: PolicySettings, gpus: Group) -> Retry:
        """Return the decision after the last start, and send it to the other ranks."""
        # The engine decides on devices and the number of ranks, so no remedy may change them.
        config = replace(
            policy.config.without("min_num_gpus"),
            device="cpu",
            auto_device=False,
            allow_cpu_fallback=False,
            wait_for_gpu=False,
        )
        policy = replace(policy, config=config)
        spec = replace(first_attempt(policy, ()), gpus=gpus)
        spec, why = choose_first_size(policy, (), spec)
        first = Retry(spec, "start", why)
        is_fresh = False
        failures = RankFailures(self.plan.run_dir)
        history = failures.read_history(beginning.job, gpus)
        if history:
            decided = self._decide_after(history, policy)
            is_fresh = decided is None
            first = decided or first
            # The engine may have started more or fewer ranks than last time.
            spec = share_among(policy, first.spec, self.guest.world_size)
            first = replace(first, spec=spec)
        number = beginning.attempts + 1
        checkpoint = None
        if beginning.checkpoint is not None:
            checkpoint = str(beginning.checkpoint)
        start = {
            "job": beginning.job,
            "run_dir": str(self.plan.run_dir),
            "number": number,
            "checkpoint": checkpoint,
            "spec": replace(first.spec, gpus=()).fields_as_json(),
            "is_fresh": is_fresh,  # whether earlier attempts no longer count
        }
        failures.write(f"attempt-{number}.json", start)
        self._publish(start)
        return first

    def _decide_after(
        self, history: Sequence[EarlierStart], policy: PolicySettings
    ) -> Retry | None:
        """Return the decision after the last start.

        Returns:
            The decision, or None if nothing can be tried but the user started the job again.

        Raises:
            ConfigError: nothing can be tried, and the engine restarted the ranks by itself.
        """
        last = history[-1]
        spec = last.attempt.spec
        if last.was_stopped:
            return Retry(spec, "start", "continues after a stop of all ranks")
        attempts = tuple(start.attempt for start in history if not start.was_stopped)
        offers = Offers(spec.gpus)
        decision = decide(policy, self.plan.remedies, attempts, offers)
        while isinstance(decision, Retry) and decision.room is not None:
            assert decision.otherwise is not None
            decision = decision.otherwise  # a guest never waits for a GPU
        if isinstance(decision, Retry):
            return replace(decision, reason=f"the last start failed: {decision.reason}")
        is_bug = last.attempt.kind is FailureKind.BUG
        if self.guest.restarts and not (is_bug and last.code_has_changed()):
            raise ConfigError(
                f"{decision.reason}; nothing is started, because {self.guest.engine} has restarted "
                "the ranks by itself and the failed code is unchanged"
            )
        return None

    def _follow(self, explain: Callable[[Summary], object]) -> Summary:
        """Run a rank other than rank 0, in the run folder that rank 0 names."""
        # Lines that every rank repeats would hide the lines that differ.
        log.setLevel(logging.WARNING)
        start = self._await_start()
        signals = SignalWatch()
        try:
            spec = replace(AttemptSpec.from_fields(start["spec"]), gpus=self.devices.acquire())
            number = int(start["number"])
            checkpoint = start["checkpoint"]
            attempt = Attempt(number, spec, resumed_from=checkpoint)
            run_dir = Path(start["run_dir"])
            # Rank 0 has saved the resolvers' values, so that all ranks use the same values.
            plan = replace(self.plan, run_dir=run_dir, resolvers=resolvers_of(run_dir))
            request = build_request(attempt, plan, plan.policy.asked)

            def take(event: Event) -> None:
                nonlocal attempt
                attempt = attempt.after(event)
                self.devices.on_event(event)

            self.executor.prepare(lambda: None)
            with signals:
                process_exit = self.executor.run(request, take, signals)
                signals.raise_if_received()
        finally:
            self.devices.queue.release()
        attempt = add_ending(attempt, request, 0.0)
        summary = Summary(
            "completed",
            request.run_dir,
            result=attempt.result,
            attempts=(attempt,),
            error=process_exit.error,
        )
        if attempt.failure is not None:
            reason = f"rank {self.guest.rank}: {attempt.message}"
            summary = replace(summary, status="failed", reason=reason)
            explain(summary)
        return summary

    def _await_start(self) -> dict[str, Any]:
        """Wait for the start that rank 0 publishes, and return it.

        Raises:
            ConfigError: rank 0 refuses to start, or publishes nothing in time.
        """
        until = time.monotonic() + _START_SECONDS
        while not self._store.check(["start"]):
            if time.monotonic() > until:
                raise ConfigError(f"rank 0 did not start within {_START_SECONDS / 60:g} min")
            time.sleep(_POLL_SECONDS)
        start: dict[str, Any] = json.loads(self._store.get("start"))
        if "refusal" in start:
            raise ConfigError(start["refusal"])
        return start


def _open_store(guest: GuestRank) -> Store:
    """Open a store for this start alone. The trainer's process group uses it as well.

    torchrun keeps its store over restarts with all its content, including the addresses of ranks
    that have ended. So rank 0 opens another store, and publishes its port in torchrun's store.
    """
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        opened: Store = next(rendezvous("env://", guest.rank, guest.world_size))[0]
        return opened

    def open_at(port: int, *, is_ours: bool = False) -> TCPStore:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            is_master=is_ours,
            wait_for_workers=False,
            multi_tenant=is_ours,
        )

    agent = open_at(int(os.environ["MASTER_PORT"]))
    key = f"robust_train/{guest.restarts}/port"
    if guest.rank == 0:
        store = open_at(0, is_ours=True)
        agent.set(key, str(store.port))
    else:
        store = open_at(int(agent.get(key)))
    os.environ["MASTER_PORT"] = str(store.port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return store


class RankDevices(Devices):
    """Reserves the GPU of one rank, whose number is the local rank, in the host's queue."""

    def __init__(
        self, guest: GuestRank, config: RobustConfig, job_name: str, run_dir: Path
    ) -> None:
        super().__init__(replace(config, num_gpus=1), job_name, os.environ, run_dir, time.sleep)
        self._guest = guest

    def acquire(self, fewer: Sequence[int] = ()) -> Group:
        """Reserve the rank's GPU and return it, or return no GPU if the rank trains on the CPU.

        Without a queue the rank uses the GPU without a reservation, after a warning.
        """
        group = self._find_gpu()
        device = group[0].uuid if group else "cpu"
        self._config = replace(
            self._config,
            device=device,
            auto_device=False,
            wait_for_gpu=False,
            allow_cpu_fallback=False,
        )
        try:
            super().acquire()
        except (ConfigError, NoDeviceError) as error:
            log.warning("%s is used without a reservation: %s", self._config.device, error)
        return group

    def _find_gpu(self) -> Group:
        """Return the rank's GPU, or no GPU if the rank trains on the CPU."""
        if not self._config.picks_gpu and self._config.device == "cpu":
            return ()
        visible = self._read(False)
        if not visible.gpus:
            return self._without_gpus(visible)
        import torch

        number = self._guest.local_rank % len(visible.gpus)
        # A trainer that names the device just "cuda" gets this GPU.
        when_cuda_starts(torch, lambda: torch.cuda.set_device(number))
        return (visible.gpus[number],)


def _run_dir(guest: GuestRank, given: str | Path | None) -> Path:
    """Return the run folder, the same for all ranks and restarts.

    Raises:
        ConfigError: no run folder was given.
    """
    if given is not None:
        return run_folder(given, "")
    if HydraConfig.initialized() and not changes_each_time():
        return run_folder(None, "")
    return run_folder(guest.folder, "")
