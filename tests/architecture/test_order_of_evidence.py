"""The order of ``assembly.FEATURES``: which features must come before which, and that it is said.

Two features commute if an attempt, its job's folder and the excluded GPUs are the same whichever of
them is asked first. If all pairs that do not commute keep their order, any order of the tuple gives
the same evidence.
"""

import itertools
import os
import pkgutil
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from attempts import built, failed, gpu, policy
from journals import Journal
from robust_train import assembly
from robust_train.config.schema import RobustConfig
from robust_train.config.words import Words
from robust_train.features.provenance import environment
from robust_train.features.time_slices.model import TimeSliceKeys
from robust_train.folder.checkpoints import Manifest, record_checkpoint
from robust_train.folder.identity import resume_from
from robust_train.folder.state import Summary
from robust_train.launcher.hooks import Hooks, InLauncher
from robust_train.model.attempt import Attempt
from robust_train.model.events import DeviceAcquired, JobEnded, JobStarted
from robust_train.model.failure import Clue, Evidence, FailureKind
from robust_train.model.spec import AttemptSpec, RetryRule, Room
from robust_train.queue.devices import FreeBytes

SPEC = AttemptSpec((gpu(0, 40),), 8, 1)
JOB = "an-id"
READ_ONLY = "[Errno 30] Read-only file system"
UNCLEAR = "could not create a primitive"
FAULT = FailureKind.DEVICE_FAULT
LIMIT = RetryRule("retry", message="ran out of host memory")
OUR_CLUSTER = RetryRule("exclude_gpu", message="node 7")

AGAIN = RetryRule("retry", message="a diverged message", times=1)

EARLIER = failed(SPEC, FailureKind.HOST_OOM, rule=2, saved_step=8)


def made_up_attempts(folder):
    """Attempts that ended in each way of which a feature knows more, and in two at once."""
    checkpoint = str(folder / "checkpoints" / "step-10.pt")
    damaged = {"evidence": Evidence(clue=Clue.DAMAGED), "exit_code": 1, "resumed_from": checkpoint}
    diverged = built(Evidence, good_step=7, bad_step=12, has_checkpoint=True)
    return {
        "completed": Attempt(2, SPEC, seconds=1.0),
        "unclear": failed(SPEC, FailureKind.BUG, message=UNCLEAR),
        "unclear, as the user knows it": failed(
            SPEC, FailureKind.BUG, message=f"{UNCLEAR} on node 7"
        ),
        "unclear, on a read-only disk": failed(
            SPEC, FailureKind.BUG, message=f"{UNCLEAR}: {READ_ONLY}"
        ),
        "a damaged checkpoint": failed(SPEC, FailureKind.BUG, **damaged),
        "a read-only disk": failed(SPEC, FailureKind.BUG, message=READ_ONLY),
        "a read-only disk, as the user knows it": failed(
            SPEC, FailureKind.BUG, message=f"node 7: {READ_ONLY}"
        ),
        "a fault of a GPU": failed(SPEC, FAULT, message="CUDA error: uncorrectable ECC error"),
        "a fault of a GPU, with a read-only disk": failed(SPEC, FAULT, message=READ_ONLY),
        "diverged": failed(SPEC, FailureKind.DIVERGED, diverged, saved_step=10),
        "out of memory, as the user knows it": failed(
            SPEC, FailureKind.HOST_OOM, message="Killed on node 7", workers_seen=2
        ),
    }


class Devices:
    """A job's devices, as far as evidence needs them."""

    def __init__(self):
        self.excluded = []
        self.acquired_at = 0.0

    def record_end(self, attempt):
        if attempt.failure is None:
            return FreeBytes()
        if attempt.kind is FAULT:
            self.excluded.append(attempt.failure.message)
        return FreeBytes(2, 1)

    def find_job_to_yield_to(self):
        return SimpleNamespace(shown_id="b", owner=0)

    def leave(self, count):
        return Room((), 0, counts=(count,))


class RunsWhenJoined:
    """A thread that runs when somebody waits for it, so never too early or too late."""

    ident = 1

    def __init__(self, target, **options):
        self._target = target

    def start(self):
        pass

    def join(self, timeout=None):
        self._target()


class Launch:
    """A job with two checkpoints whose attempt has ended, as its features see it."""

    def __init__(self, run_dir, prepared):
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(prepared, run_dir)
        config = RobustConfig(theirs={}).having(TimeSliceKeys(0.0))
        self.signals = SimpleNamespace(received=None, can_stop=True)
        self.plan = SimpleNamespace(run_dir=run_dir, config=config, words=Words(config.theirs))
        self.policy = policy(8, rules=(LIMIT, OUR_CLUSTER, AGAIN))
        self.beginning = SimpleNamespace(job=JOB, checkpoint=None)
        self.driver = SimpleNamespace(has_remedies=True, devices=Devices())

    def was_stopped(self, attempt):
        return False

    def look_for_checkpoint(self):
        return resume_from(self.plan.run_dir, JOB)

    def files(self):
        return {
            path.name: path.read_bytes()
            for path in sorted(self.plan.run_dir.rglob("*"))
            if path.is_file() and path.name != "environment.json"  # has the time
        }


@pytest.fixture
def prepared(tmp_path):
    """A run folder of a job with two checkpoints, and a journal."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    for step in (5, 10):
        path = run_dir / "checkpoints" / f"step-{step}.pt"
        path.write_bytes(b"weights")
        record_checkpoint(path.parent, Manifest(JOB, 1, step, path, loss="finite"))
    journal = Journal(run_dir)
    journal(0, JobStarted("/run", "train", JOB))
    journal(500, JobEnded("completed"))
    return run_dir.rename(tmp_path / "prepared")


def halves_with(hook):
    """The launcher's halves that have this hook, by their features, in the order of the tuple."""
    halves = {
        feature.name: pkgutil.resolve_name(feature.launcher)
        for feature in assembly.FEATURES
        if feature.launcher
    }
    return {
        name: half
        for name, half in halves.items()
        if getattr(half, hook) is not getattr(InLauncher, hook)
    }


def pairs_that_do_not_commute(hook, outcome):
    """The pairs of features for which ``outcome`` of a list of halves depends on its order."""
    halves = halves_with(hook)
    return {
        (first, second)
        for first, second in itertools.combinations(halves, 2)
        if outcome([halves[first], halves[second]]) != outcome([halves[second], halves[first]])
    }


def named_pairs():
    """The pairs that the docstring in ``assembly.py`` gives a reason for."""
    text = Path(assembly.__file__).read_text()
    return set(re.findall(r"^- features\.(\w+) before features\.(\w+): \w", text, re.M))


def test_noncommuting_pairs_are_named_with_reasons(tmp_path, monkeypatch, prepared):
    """No other pairs are named; each is in the order of the tuple."""
    run_dir = tmp_path / "run"
    real = os.statvfs

    def read_only(path):
        return SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=real(path).f_blocks)

    monkeypatch.setattr(os, "statvfs", read_only)
    monkeypatch.setattr(environment, "threading", SimpleNamespace(Thread=RunsWhenJoined))

    def evidence(halves):
        outcomes = []
        for attempt in made_up_attempts(run_dir).values():
            launch = Launch(run_dir, prepared)
            for half in halves:
                attempt = half(launch).evidence(attempt, (EARLIER,))
            outcomes.append((attempt, launch.driver.devices.excluded, launch.files()))
        return outcomes

    def end(halves):
        launch = Launch(run_dir, prepared)
        features = [half(launch) for half in halves]
        summary = Summary("completed", run_dir)
        for feature in features:
            feature.event(DeviceAcquired("cpu"), None)
        for feature in features:
            summary = feature.end(summary)
        return summary, launch.files()

    def overrule(halves):
        """An attempt fails while it is paused, and the next one is killed."""
        launch = Launch(run_dir, prepared)
        features = [half(launch) for half in halves]
        first = failed(SPEC, FailureKind.BUG, saves=1, rule=0)
        for feature in features:
            feature.tick(first)
        killed = failed(SPEC, FailureKind.INTERRUPTED, number=2)
        hooks = Hooks({str(number): feature for number, feature in enumerate(features)})
        return hooks.overrule((first,)), hooks.overrule((first, killed))

    pairs = pairs_that_do_not_commute("evidence", evidence)
    pairs |= pairs_that_do_not_commute("overrule", overrule)
    pairs |= pairs_that_do_not_commute("end", end)
    assert pairs == named_pairs()
