"""What is measured of each step: on a clock of the test's own, and over real steps."""

import copy
import itertools
import pickle

import pytest
from omegaconf import OmegaConf

from robust_train.attempt import speed as module
from robust_train.attempt.run import Run, live_of
from robust_train.attempt.runner import call_trainer
from robust_train.attempt.speed import SpeedMeter
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.training_plans import MicroBatchPlan


class Clock:
    """A host's clock, and a GPU that computes what is queued, one thing after the other."""

    def __init__(self):
        self.now = 100.0
        self.gpu_free_at = 0.0

    def perf_counter(self):
        return self.now

    def queue(self, seconds):
        """Keep the GPU busy for this long, without waiting for it."""
        self.gpu_free_at = max(self.gpu_free_at, self.now) + seconds

    def synchronize(self):
        self.now = max(self.now, self.gpu_free_at)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def gpu(clock, monkeypatch):
    class FakeEvent:
        fails = False

        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            if FakeEvent.fails:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            self.at = max(clock.now, clock.gpu_free_at)

        def query(self):
            return clock.now >= self.at

        def elapsed_time(self, later):
            assert self.query(), "CUDA raises otherwise"
            assert later.query(), "likewise"
            return 1000 * (later.at - self.at)

    cuda = type("cuda", (), {"Event": FakeEvent, "current_device": lambda: 0})
    torch = type("torch", (), {"cuda": cuda, "_C": object()})
    monkeypatch.setattr(module, "started_torch", lambda: torch)
    return FakeEvent


def test_a_trainer_that_only_reports_progress(clock):
    meter = SpeedMeter(samples=lambda: 32)
    durations = [5.0, *[0.1] * 50, *[0.2] * 3, *[0.4] * 6]  # the first step warms up
    for step, seconds in enumerate(durations, start=1):
        clock.now += seconds
        meter.step_done(step)
    speed = meter.speed()
    assert speed.steps == len(durations) - 1
    assert speed.seconds_per_step == pytest.approx(0.1, rel=0.01)
    assert speed.seconds_per_step_p95 == pytest.approx(0.4, rel=0.01)
    assert speed.samples_per_second == pytest.approx(32 * 59 / sum(durations[1:]), rel=0.01)
    assert (speed.data_share, speed.seconds_alone_per_step) == (None, None), "absent, not 0"


def test_steps_reported_in_groups_count_singly(clock):
    meter = SpeedMeter()
    for step in (10, 20, 40):
        assert (meter.speed() is None) == (step < 40), "before the second step nothing is known"
        meter.step_done(step)
        clock.now += step / 10
    assert meter.speed().steps == 30
    assert meter.speed().seconds_per_step == pytest.approx(0.1, rel=0.01)
    assert meter.speed().samples_per_second is None, "the batch is not known"


@pytest.mark.parametrize("explicit", [True, False])
def test_the_share_of_waiting_for_data(clock, explicit):
    meter = SpeedMeter()

    def loader():
        for step in range(1, 101):
            # a validation that no one reports is no wait for data
            clock.now += 50.3 if step % 25 == 0 and not explicit else 0.3
            yield 8

    batches = meter.measure_waits(loader()) if explicit else loader()
    for step, samples in enumerate(batches, start=1):
        meter.batch_begins(samples)
        clock.now += 0.1
        meter.step_done(step)
    speed = meter.speed()
    measured, missing = ("data_share", "between_share")[:: 1 if explicit else -1]
    assert getattr(speed, measured) == pytest.approx(0.75, rel=0.02)
    assert getattr(speed, missing) is None
    assert speed.samples_per_second == pytest.approx(8 / 0.4, rel=0.05)


def test_only_training_steps_are_timed(clock, tmp_path):
    """Checkpoints, validation and ends of epochs are left out."""
    run = Run(run_dir=tmp_path)
    live_of(run).parts.split_by(MicroBatchPlan(batch_size=4, gradient_accumulation_steps=2))
    pauses = {
        3: run.epoch_ended,
        4: lambda step: run.checkpoint_saved(tmp_path / "x", step),
        5: lambda step: run.forward(len, [1, 2]),
    }
    for step in range(1, 31):
        clock.now += 0.1
        run.progress(step)
        for each, pause in pauses.items():
            if step % each == 0:
                clock.now += 30
                pause(step)
    speed = live_of(run).speed.speed()
    assert speed.seconds_per_step_p95 == pytest.approx(0.1, rel=0.01)
    assert speed.samples_per_second == pytest.approx(80, rel=0.01)
    assert speed.steps < 29


def test_known_loaders_count_an_epochs_first_batch(clock, tmp_path):
    run, step = Run(run_dir=tmp_path), itertools.count(1)

    def loader():
        clock.now += 1.0  # its workers start
        yield from range(10)

    for epoch in range(3):
        for _ in run.batches(loader()):
            clock.now += 0.1
            run.progress(next(step))
        clock.now += 500
        run.epoch_ended(epoch)
    speed = live_of(run).speed.speed()
    assert speed.steps == 29
    assert speed.data_share == pytest.approx(2 / (2 + 2.9), rel=0.01)


@pytest.mark.parametrize(
    ("wait", "compute", "share"),
    [(0.8, 1.0, 0), (1.0, 0.6, 1 / 1.6)],
    ids=["the GPU computes all the time", "it is idle"],
)
def test_an_idle_gpu_means_waiting_for_data(clock, gpu, wait, compute, share):
    meter = SpeedMeter()
    for step in range(1, 31):
        meter.wait_begins()
        clock.now += wait
        meter.wait_ends()
        clock.queue(compute)
        meter.step_done(step)
        if share:
            clock.synchronize()
    assert meter.speed().data_share == pytest.approx(share, rel=0.02)


def test_a_rank_is_alone_before_others_meet(clock, gpu):
    """It is alone until its GPU meets the others."""
    meter = SpeedMeter(2)
    for step in range(1, 31):
        clock.queue(0.8)
        meter.alone_until_now()
        clock.queue(0.2)  # and waits for the others there
        clock.synchronize()
        meter.step_done(step)
    assert meter.speed().seconds_alone_per_step == pytest.approx(0.8, rel=0.01)


def test_a_failing_gpu_costs_only_its_figures(clock, gpu):
    meter = SpeedMeter()
    meter.step_done(1)
    gpu.fails = True
    clock.now += 0.1
    meter.wait_begins()
    meter.wait_ends()
    meter.batch_begins(4)
    meter.step_done(2)
    meter.send()
    clock.now += 0.1
    meter.step_done(3)
    assert meter.speed().data_share is not None


def test_the_figures_are_sent_ever_more_seldom(clock):
    sent = []
    meter = SpeedMeter(4, report=sent.append)
    for step in range(1, 36_001):
        meter.step_done(step)
        clock.now += 0.1
    assert 100 < len(sent) < 140, "an hour"
    assert sent[0].steps < 20, "after a second"


def test_a_gpu_without_a_context_gets_none(gpu, monkeypatch):
    """The trainer uses another one than the current one."""
    torch = module.started_torch()
    torch._C = type("_C", (), {"_cuda_hasPrimaryContext": staticmethod(lambda index: False)})
    monkeypatch.setattr(gpu, "record", lambda event: pytest.fail("the GPU was asked"))
    assert module.Moment().is_past()


def looks_elsewhere(cfg):
    saved = pickle.dumps(cfg)
    assert b"attempt.loading" not in saved, "a checkpoint is read without us, too"
    return cfg.training.lr, copy.deepcopy(cfg), saved


@pytest.mark.parametrize(
    ("look", "rate"),
    [
        (looks_elsewhere, None),
        (lambda cfg: cfg.training.batch_size, 32),
        (lambda cfg: cfg["data"]["train_batch_size"], 32),
        (lambda cfg: OmegaConf.to_container(cfg), 32),
        (lambda cfg: copy.deepcopy(cfg).training.batch_size, 32),
    ],
)
def test_an_ignored_batch_size_means_no_samples(clock, tmp_path, look, rate):
    """The trainer does not read it: ``data.train_batch_size`` refers to it, and is resolved
    before.
    """
    run = called(tmp_path, look, {"train_batch_size": "${training.batch_size}"})
    for step in range(1, 4):
        run.progress(step)
        clock.now += 2.0
    assert live_of(run).speed.speed().samples_per_second == rate


def called(folder, look, data):
    """A run after a trainer that only looks at its config."""
    cfg = complete({"data": data})
    OmegaConf.resolve(cfg)
    run = Run(run_dir=folder)
    call_trainer(lambda cfg: look(cfg) and cfg.training.lr, cfg, checked(cfg), run)
    return run


@pytest.mark.parametrize(
    ("data", "look", "reads"),
    [
        ({"num_workers": [2, 0]}, lambda data: data.num_workers[0], True),
        ({"num_workers": {"train": 2}}, lambda data: data.num_workers.train, True),
        ({"loaders": [{"num_workers": 2}]}, lambda data: data.loaders[0].num_workers, True),
        ({"workers": "${training.num_workers}"}, lambda data: data.workers, True),
        ({"workers": None, "loaders": None}, lambda data: data.loaders, False),
    ],
)
def test_worker_numbers_may_have_any_shape(tmp_path, data, look, reads):
    """A trainer keeps them as it likes."""
    run = called(tmp_path, lambda cfg: look(cfg.data), data)
    assert live_of(run).has_read("workers") is reads
