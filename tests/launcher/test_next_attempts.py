"""What the story of a job does between two attempts, with a driver that decides as it is told."""

from dataclasses import replace
from types import SimpleNamespace

from plans import plan_in
from robust_train.features.divergence import FEATURE
from robust_train.features.divergence.record import DivergedFinding
from robust_train.launcher.driver import HostDriver
from robust_train.launcher.job import Job
from robust_train.model.events import CheckpointSaved, Failed, Progress
from robust_train.model.exit import Exit
from robust_train.model.failure import Evidence, Failure, FailureKind
from robust_train.model.spec import GiveUp, Retry


def do_nothing(*arguments):
    pass


class Told(HostDriver):
    """Runs attempts that send these events, and decides what it is told, in order."""

    def __init__(self, plan, *decisions, events=(), races=()):
        super().__init__(plan)
        races = iter(races)
        self._decisions = iter(decisions)
        self._events = iter(events)
        queue = SimpleNamespace(hold=(), release=lambda: None)
        self.devices = SimpleNamespace(
            acquire=lambda fewer: (),
            take=lambda group: next(races, True),
            on_event=lambda event: None,
            queue=queue,
        )
        self.executor = SimpleNamespace(
            prepare=do_nothing, poll=do_nothing, close=do_nothing, run=self._run
        )

    def open(self, *arguments):
        pass

    def _make_executor(self, signals, token):
        return self.executor

    def _run(self, request, on_event, signals, **options):
        for event in next(self._events, ()):
            on_event(event)
        return Exit(returncode=1)

    def decide(self, policy, history):
        return next(self._decisions)(history[-1].spec)


def again(pause_seconds=0.0):
    return lambda spec: Retry(spec, "retry", "again", pause_seconds=pause_seconds)


def give_up(spec):
    return GiveUp("enough")


def test_a_lost_race_may_lead_to_a_pause(tmp_path, monkeypatch):
    plan = plan_in(tmp_path / "run")
    job = Job(plan, Told(plan, again(), again(7.0), give_up, races=[False]))
    slept = []
    monkeypatch.setattr(job.signals, "sleep", lambda seconds, tick: slept.append(seconds))
    assert job.run().reason == "enough"
    assert [attempt.reason for attempt in job.attempts] == ["again", "enough"]
    assert 7.0 in slept, "what is decided after the race says that it waits"


def test_training_from_the_beginning_starts_at_0(tmp_path):
    """Although the attempt before had saved a checkpoint, which was ruled out since."""
    plan = replace(plan_in(tmp_path / "run"), features=(FEATURE,))
    finding = DivergedFinding(good_step=50, bad_step=63)
    diverged = Failure(FailureKind.DIVERGED, "diverged", Evidence().having(finding))
    path = str(plan.run_dir / "checkpoints" / "60.pt")
    events = (CheckpointSaved(path, 60), Progress(63, None, {}), Failed(diverged))
    # the second one ends before its first report
    job = Job(plan, Told(plan, again(), give_up, events=[events]))
    job.run()
    assert [(attempt.start_step, attempt.end_step) for attempt in job.attempts] == [
        (0, 63),
        (0, None),
    ]
