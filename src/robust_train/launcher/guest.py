"""A guest of torchrun, srun, PyTorchJob or Ray Train: this process is one rank of their job.

The engine handles rendezvous, restarts and dead machines. The guest starts no child process and
chooses no GPU. Rank 0 keeps the run folder. A rank that fails leaves its failure in ``ranks/``
before it ends, and rank 0 of the next start decides from all of them how the job resumes.
``attempt-N.json`` holds the start of attempt N by rank 0, and ``attempt-N.rank-K.json`` the failure
of rank K. A rank without such a file was killed. Damage in ``ranks/`` never ends a rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from robust_train.compat import when_cuda_starts
from robust_train.config.attempt import guest_config
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import Trainer
from robust_train.files import json_lines, read_object, write_json
from robust_train.folder.hydra_state import changes_each_time, run_folder
from robust_train.folder.identity import Beginning
from robust_train.folder.resolvers import resolvers_of
from robust_train.folder.state import RunState, Summary
from robust_train.host.engine import TORCHRUN, GuestRank
from robust_train.host.linux import shared_machine_environment, signal_at_parents_death
from robust_train.host.signals import SignalWatch
from robust_train.host.votes import StoreVotes
from robust_train.launcher.driver import Driver
from robust_train.launcher.ending import RankEnd, ended
from robust_train.launcher.inline import InlineExecutor, function_of, own_modules, shield_workers
from robust_train.launcher.plan import Plan, plan_job
from robust_train.launcher.request import request_for
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoDeviceError
from robust_train.model.events import Event, Failed, MalformedEventError, parse
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
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

# The other ranks wait this long for rank 0, which may wait for a disk or for the last start's
# processes.
_START_SECONDS = 1800.0
_POLL_SECONDS = 0.05


class RankDriver(Driver):
    """This process as one rank of an engine's job; rank 0 drives a :class:`.job.Job` as well.

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
        self._has_begun = False
        self.votes = StoreVotes(self._store, guest.rank, guest.world_size)
        self.devices = RankDevices(guest, plan.config, plan.name, plan.run_dir)
        self.executor = InlineExecutor(
            functools.cache(lambda: function_of(plan.trainer, plan.trainer_ref)),
            rank=guest.rank,
            flags=self.votes,
            on_failure=lambda request, event: RankFailures(request.run_dir).leave(
                request.attempt, guest.rank, event
            ),
        )

    def run_part(
        self, run_first: Callable[[], Summary], explain: Callable[[Summary], object]
    ) -> Summary:
        """Run this rank's part of the job, ``run_first`` as rank 0, and return its summary.

        Raises:
            ConfigError: rank 0 refuses to continue.
            JobInterrupted: a signal stopped this rank.
        """
        with self.votes:
            if self.guest.rank:
                return self.follow(explain)
            refusal = "rank 0 has ended"
            try:
                summary = run_first()
                refusal = str(summary.reason)
                return summary
            except BaseException as error:
                refusal = str(error)
                raise
            finally:  # else the other ranks would wait in vain for this start
                self.begin({"refusal": refusal})

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
        """Return the retry at once: the engine has given the GPUs."""
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

    def begin(self, start: Mapping[str, object]) -> None:
        """Tell the other ranks how this start begins. Rank 0 calls it, and only its first call
        counts."""
        if not self._has_begun:
            self._has_begun = True
            self._store.set("start", json.dumps(start))

    def first(self, beginning: Beginning, policy: PolicySettings, gpus: Group) -> Retry:
        """Return the decision after the last start, and send it to the other ranks."""
        # The engine decides on devices and the number of ranks, so all ranks keep them.
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
        history = failures.history(beginning.job, gpus)
        if history:
            decided = self._after(history, policy)
            first = decided or first
            # the engine may have started more or fewer ranks than last time
            spec = share_among(policy, first.spec, self.guest.world_size)
            first = replace(first, spec=spec)
            is_fresh = decided is None
        number = beginning.attempts + 1
        checkpoint = beginning.checkpoint
        start = {
            "job": beginning.job,
            "run_dir": str(self.plan.run_dir),
            "number": number,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "spec": replace(first.spec, gpus=()).fields_as_json(),
            "is_fresh": is_fresh,  # whether earlier attempts no longer count
        }
        failures.write(f"attempt-{number}.json", start)
        self.begin(start)
        return first

    def _after(self, history: Sequence[EarlierStart], policy: PolicySettings) -> Retry | None:
        """Return the decision after the last start, or None if the user started the job again."""
        last = history[-1]
        spec = last.attempt.spec
        if last.was_stopped:
            return Retry(spec, "start", "continues after a stop of all ranks")
        attempts = tuple(start.attempt for start in history if not start.was_stopped)
        offers = Offers(spec.gpus)
        decision = decide(policy, self.plan.remedies, attempts, offers)
        while isinstance(decision, Retry) and decision.room is not None:
            assert decision.otherwise is not None
            decision = decision.otherwise  # because a guest never waits for a GPU
        if isinstance(decision, Retry):
            return replace(decision, reason=f"the last start failed: {decision.reason}")
        is_bug = last.attempt.kind is FailureKind.BUG
        if self.guest.restarts and not (is_bug and last.code_has_changed()):
            raise ConfigError(
                f"{decision.reason}; nothing is started, because {self.guest.engine} has restarted "
                "the ranks by itself and the failed code is unchanged"
            )
        return None

    def follow(self, explain: Callable[[Summary], object]) -> Summary:
        """Run a rank other than rank 0, in the run folder that rank 0 names."""
        # If every rank printed the same lines, they would hide the differences.
        log.setLevel(logging.WARNING)
        start = self._await_start()
        signals = SignalWatch()
        try:
            spec = replace(AttemptSpec.from_fields(start["spec"]), gpus=self.devices.acquire())
            number = int(start["number"])
            checkpoint = start["checkpoint"]
            attempt = Attempt(number, spec, resumed_from=checkpoint)
            run_dir = Path(start["run_dir"])
            # The resolvers' values are those of rank 0.
            plan = replace(self.plan, run_dir=run_dir, resolvers=resolvers_of(run_dir))
            request = request_for(attempt, plan, plan.policy.asked)

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
        attempt = ended(attempt, request, 0.0)
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
        """Return how this start begins.

        Raises:
            ConfigError: rank 0 refuses.
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
    """Open a store of this start alone, which also creates the trainer's process group.

    torchrun's store outlives its restarts with all its content, including the addresses of ranks
    that have ended. So rank 0 opens another store, and publishes its port in torchrun's.
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
    """The GPU whose number is the local rank, reserved in the host's queue if there is one."""

    def __init__(
        self, guest: GuestRank, config: RobustConfig, job_name: str, run_dir: Path
    ) -> None:
        super().__init__(replace(config, num_gpus=1), job_name, os.environ, run_dir, time.sleep)
        self._guest = guest

    def acquire(self, fewer: Sequence[int] = ()) -> Group:
        """Reserve and return that GPU, or return no GPU if the rank trains on the CPU."""
        group = self._find_gpu()
        self._config = replace(
            self._config,
            device=group[0].uuid if group else "cpu",
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
        if not self._config.picks_gpu and self._config.device == "cpu":
            return ()
        visible = self._read(False)
        if not visible.gpus:
            return self._without_gpus(visible)
        import torch

        number = self._guest.local_rank % len(visible.gpus)
        # Trainers that say just "cuda" get this GPU.
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


# --- how earlier starts have failed -------------------------------------------------------------


@dataclass(frozen=True)
class EarlierStart:
    """An attempt of an earlier start, and how its ranks failed."""

    attempt: Attempt
    # The source files of the failed rank's trainer, with the time of each file's last change.
    code: Mapping[str, float]

    @property
    def was_stopped(self) -> bool:
        """Whether a signal stopped all ranks, and none was killed or failed."""
        is_stop = self.attempt.kind is FailureKind.INTERRUPTED
        return is_stop and self.attempt.evidence.clue != Clue.KILLED

    def code_has_changed(self) -> bool:
        """Return whether any of the trainer's files has changed since the failure."""
        return any(_changed_at(path) != at for path, at in self.code.items())


def cause_of(ends: Sequence[RankEnd]) -> Failure:
    """Return why an attempt failed: the earliest failure that is not a consequence of others.

    If all reports are consequences (a lost connection, a request to stop), a rank without a report
    was killed. If every rank was stopped, that is the reason. Pure.
    """
    counted = [end for end in ends if not end.was_stopped] or ends
    root = min(counted, key=lambda end: end.order)
    if root.report is not None:
        return root.report.failure
    killed = [str(end.rank) for end in ends if end.ending is None]
    is_one = len(killed) == 1
    what = f"rank {killed[0]} was" if is_one else f"ranks {', '.join(killed)} were"
    return Failure(
        FailureKind.INTERRUPTED,
        f"{what} killed",
        Evidence(clue=Clue.KILLED),
        rank=root.rank if is_one else None,
    )


class RankFailures:
    """The folder ``ranks/`` in a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._journal = run_dir / "journal.jsonl"
        self._folder = run_dir / "ranks"

    def leave(self, number: int, rank: int, event: Failed) -> None:
        """Record how this rank's part of attempt ``number`` failed."""
        content = {
            "at": time.time(),
            "rank": rank,
            "code": _code(),
            "event": replace(event, error="").as_json(),
        }
        self.write(f"attempt-{number}.rank-{rank}.json", content)

    def history(self, job: str, gpus: Group) -> Sequence[EarlierStart]:
        """Return the job's earlier attempts that count, oldest first."""
        attempts: dict[int, Attempt] = {}
        names = (path.stem[len("attempt-") :] for path in self._folder.glob("*.json"))
        for number in sorted(int(name) for name in names if name.isdigit()):
            start = read_object(self._folder / f"attempt-{number}.json")
            if start.get("job") != job:
                continue
            with contextlib.suppress(MalformedEventError):
                spec = AttemptSpec.from_fields(start.get("spec"))
                if start.get("is_fresh"):
                    attempts.clear()
                attempts[number] = Attempt(number, replace(spec, gpus=gpus))
        # Rank 0's journal shows how far they got.
        with contextlib.suppress(OSError):
            for content in filter(None, json_lines(self._journal)):
                which = content.get("attempt")
                if which in attempts:
                    with contextlib.suppress(MalformedEventError):
                        attempts[which] = attempts[which].after(parse(content))
        return [self._ended(attempt) for attempt in attempts.values()]

    def _ended(self, attempt: Attempt) -> EarlierStart:
        """Return an earlier attempt with its failure, as the files of its ranks show it."""
        ends: list[RankEnd] = []
        code: dict[int, dict[str, float]] = {}
        for rank in range(attempt.spec.ranks):
            name = f"attempt-{attempt.number}.rank-{rank}.json"
            content = read_object(self._folder / name)
            end = RankEnd(rank)
            with contextlib.suppress(MalformedEventError, KeyError, TypeError):
                event = parse(content["event"])
                if isinstance(event, Failed):
                    code[rank] = dict(content["code"])
                    end = replace(end, ending=event, at=float(content["at"]))
            ends.append(end)
        failure = cause_of(ends)
        return EarlierStart(
            replace(attempt, failure=failure, seconds=0.0), code.get(failure.rank or 0, {})
        )

    def write(self, name: str, content: Mapping[str, object]) -> None:
        """Write a file into the folder. A disk that refuses it costs a warning."""
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / name, dict(content), durable=True)
        except OSError as error:
            path = self._folder / name
            log.warning("cannot write %s: %s", path, error.strerror)


def _code() -> dict[str, float]:
    """Return the user's files that this process runs or has imported, with the time of each file's
    last change."""
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    files = [main] + [path for _, path in own_modules()]
    times = {path: _changed_at(path) for path in files}
    return {path: at for path, at in times.items() if at}


def _changed_at(path: str) -> float:
    """Return when a file was last changed, 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
