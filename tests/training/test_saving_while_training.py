"""``run.save``, ``run.load`` and ``run.batches``: a loop continues with the very next batch."""

import itertools
import threading

import numpy
import pytest
import torch

from robust_train import launch
from robust_train.attempt.run import Run, live_of
from robust_train.config.training_plans import SavePlan
from robust_train.folder.checkpoints import mark, read_manifests
from robust_train.model.errors import TrainingDiverged, UserError
from taking_part import guarded

CFG = {"device": "cpu", "isolation": "none", "retry_pause_seconds": 0.1}


def own_loop(cfg, run):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "seen": []}
    values = (float("nan") if n == cfg.bad else n / cfg.batches for n in range(cfg.batches))
    data = [(n, torch.full((2, 4), value)) for n, value in enumerate(values)]
    step = run.load(state)
    while step < cfg.steps:
        for number, batch in itertools.islice(run.batches(data), cfg.steps - step):
            step += 1
            loss = run.backward(lambda x: ((model(x) - 1) ** 2).mean(), batch, model)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["seen"].append(number)
            run.progress(step, total_steps=cfg.steps, loss=loss)
            if step % 4 == 0:
                run.save(state, step)
            if step == cfg.get("fails", {}).get(run.attempt):
                live_of(run).saves.finish()
                raise ConnectionError("the data's server is gone")
    return {"seen": state["seen"], "weight": model.weight.tolist()}


def threads_that_saves_start(cfg, run):
    before = set(threading.enumerate())
    assert any(thread.name.startswith("checkpoint") for thread in before)
    for step in range(3):
        run.save({"values": torch.zeros(1)}, step)
    started = set(threading.enumerate()) - before
    live_of(run).saves.finish()
    return [thread.name for thread in started | set(threading.enumerate()) - before]


def test_no_save_starts_a_thread(tmp_path):
    """Where memory is short a new thread may wait forever."""
    assert launch(threads_that_saves_start, CFG, run_dir=tmp_path).result == []


@pytest.mark.slow
def test_a_twice_failed_loop_ends_like_any_other(tmp_path):
    """It sees each batch once and ends with the same weights."""
    cfg = CFG | {"steps": 25, "batches": 10, "bad": None}
    undisturbed = launch(own_loop, cfg, run_dir=tmp_path / "undisturbed")
    failed = launch(own_loop, cfg | {"fails": {1: 7, 2: 18}}, run_dir=tmp_path / "failed")
    assert [attempt.start_step for attempt in failed.attempts] == [0, 4, 16]
    assert failed.result == undisturbed.result
    assert failed.result["seen"] == [n % 10 for n in range(25)]


@pytest.mark.slow
def test_a_loop_continues_past_a_spoiling_batch(tmp_path):
    """The batch spoilt its weights."""
    job = launch(own_loop, CFG | {"steps": 40, "batches": 40, "bad": 26}, run_dir=tmp_path)
    assert [attempt.outcome for attempt in job.attempts] == ["diverged", "completed"]
    assert job.attempts[1].start_step == 24
    assert job.attempts[1].spec.noted("skips_to", 0) > 26
    assert not numpy.isnan(job.result["weight"]).any()


@pytest.fixture
def run(tmp_path):
    return Run(run_dir=tmp_path)


class Loader:
    """Counts by itself, as torchdata's ``StatefulDataLoader`` does."""

    def __init__(self, extra=None):
        self.at, self.extra = 0, extra

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield self.at

    def state_dict(self):
        return {"at": self.at, "extra": self.extra}

    def load_state_dict(self, state):
        self.at, self.extra = state.values()


class Stream(torch.utils.data.IterableDataset):
    """Has no length, and so has no loader of it."""

    def __iter__(self):
        return iter(range(1, 7))


def saved_at(run, step, **state):
    """A later attempt's run that resumes from a checkpoint of this step, saved by ``run``."""
    run.save(state, step)
    live_of(run).saves.finish()
    path = run.checkpoint_dir / f"step-{step:08d}.pt"
    return Run(run_dir=run.run_dir, attempt=2, resume_checkpoint=path)


LOADERS = {
    "with a state": Loader,
    "with a state that is no JSON": lambda: Loader(torch.ones(1)),
    "with a length": lambda: range(1, 7),
    "of a stream": lambda: torch.utils.data.DataLoader(Stream(), batch_size=None),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_a_pass_resumes_after_the_checkpoints_batch(run, loader):
    for batch in run.batches(loader()):
        run.progress(batch)
        if batch == 4:
            later = saved_at(run, batch, some=1)
            break
    state = {"some": 0}
    assert (later.load(state), state) == (4, {"some": 1})
    assert list(later.batches(loader())) == [5, 6]
    assert list(later.batches(loader())) == [1, 2, 3, 4, 5, 6]


def test_smaller_batches_resume_after_the_seen_samples(run):
    def loader(size):
        return torch.utils.data.DataLoader(range(24), batch_size=size)

    for number, _ in enumerate(run.batches(loader(8)), 1):
        later = saved_at(run, number) if number == 2 else None
        if later:
            break
    later.load({})
    assert [batch.tolist() for batch in later.batches(loader(4))] == [
        [16, 17, 18, 19],
        [20, 21, 22, 23],
    ]


def test_each_rank_resumes_with_its_own_data(tmp_path):
    """It does not resume with the data of rank 0."""
    first = Run(run_dir=tmp_path, world_size=2)
    next(first.batches(Loader("of the first")))
    newest = saved_at(first, 1).resume_checkpoint
    second = Run(run_dir=tmp_path, rank=1, world_size=2, resume_checkpoint=newest)
    loader = Loader("of the second")
    assert list(second.batches(loader)) == [2, 3, 4, 5, 6]
    assert loader.extra == "of the second"


def test_after_a_whole_stream_the_next_is_whole(run):
    list(run.batches(iter(Stream())))
    later = saved_at(run, 6, some=1)
    later.load({"some": 0})
    assert list(later.batches(iter(Stream()))) == [1, 2, 3, 4, 5, 6]


def test_without_intact_checkpoints_a_loop_starts_over(run, caplog):
    """A line says so."""
    later = saved_at(run, 4, some=1)
    later.resume_checkpoint.write_bytes(b"damaged")
    assert later.load({"some": 0}) == 0
    assert caplog.messages[-1] == "no checkpoint is intact: training starts from the beginning"


def test_what_cannot_be_reloaded_is_refused_when_saving(run):
    later = saved_at(run, 4, best=numpy.float64(0.5), rates=[{"lr": numpy.float32(0.25)}])
    state = {"best": 0, "rates": 0}
    assert (later.load(state), state) == (4, {"best": 0.5, "rates": [{"lr": 0.25}]})
    with pytest.raises(UserError, match=r"run\.save: 'rng' has an object"):
        run.save({"rng": numpy.random.get_state()}, 5)


def test_a_whole_but_useless_checkpoint_stops_the_job(run):
    """It does not start over next to a checkpoint that it cannot use."""
    later = saved_at(run, 4, some=1)
    with pytest.raises(UserError, match="is whole, but it has no 'more'"):
        later.load({"some": 0, "more": 0})


def test_data_with_which_training_diverged_is_passed_over(tmp_path, run):
    live_of(run).saving.job = "j"
    for batch in run.batches(range(10)):
        run.progress(batch + 1)
        if batch == 3:
            run.save({}, 4)
    live_of(run).saves.finish()
    newest = tmp_path / "checkpoints/step-00000004.pt"
    later = Run(run_dir=tmp_path, attempt=2, resume_checkpoint=newest)
    live_of(later).saves.skip_to(6)
    later.load({})
    assert list(later.batches(range(10))) == [6, 7, 8, 9]
    guarded(later, patience=1)
    live_of(later).saving.job = "j"
    mark(run.checkpoint_dir, "j", lambda manifest: "proven")
    with pytest.raises(TrainingDiverged) as again:
        later.progress(5, loss=float("nan"))
    assert again.value.failure.evidence.bad_step == 7, "the two that were passed over stay so"


def test_a_checkpoint_written_while_training_diverges_is_marked(run):
    guarded(run, patience=9)
    for step, loss in ((1, 0.5), (2, 0.4), (3, float("nan"))):
        run.progress(step, loss=loss)
        run.save({}, step)
    live_of(run).saves.finish()
    losses = {manifest.step: manifest.loss for manifest in read_manifests(run.checkpoint_dir)}
    assert losses == {1: "finite", 2: "finite", 3: "diverged"}, (
        "the oldest may be the last good one"
    )


def test_no_checkpoint_is_due_without_finite_losses(run):
    guarded(run, patience=9)
    live_of(run).saving.follow(SavePlan(0.0))
    due = []
    for step, loss in enumerate((0.5, float("nan"), float("inf"), 0.4), 1):
        run.progress(step, loss=loss)
        due.append(run.should_save())
    assert due == [True, False, False, True]


def test_tensors_whose_names_are_alike_stay_apart(run):
    saved = {"net": {"ema.weight": torch.zeros(2)}, "net.ema": {"weight": torch.ones(2)}}
    later = saved_at(run, 1, **saved)
    loaded = dict.fromkeys(saved)
    later.load(loaded)
    assert [part.sum() for state in loaded.values() for part in state.values()] == [0, 2]


def test_sharded_tensors_are_refused(run):
    class Sharded(torch.Tensor):
        def to_local(self):
            return self

    with pytest.raises(UserError, match=r"run\.save: the state has sharded tensors"):
        run.save({"model": torch.ones(2).as_subclass(Sharded)}, 1)
