"""Each sample is seen once where a later attempt has batches of another size, or a line says that
this is uncertain."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from robust_train.attempt.data_position import Batches, BatchFacts
from robust_train.attempt.data_source import count_samples, cut_first_samples, examine_loader
from robust_train.attempt.run import Run, live_of
from robust_train.config.training_plans import MicroBatchPlan

SAMPLES = 41


def of_size(tmp_path, attempt, size, **options):
    """Return the run of an attempt with micro-batches of this size."""
    run = Run(run_dir=tmp_path, attempt=attempt, **options)
    live_of(run).parts.split_by(
        MicroBatchPlan(batch_size=size, gradient_accumulation_steps=16 // size)
    )
    return run


def resumed(tmp_path, make, *, sizes, taken, ranks=(1, 1)):
    """Return samples of an attempt that ended after ``taken`` batches, and of the next attempt."""
    first = of_size(tmp_path, 1, sizes[0], world_size=ranks[0])
    seen = []
    for batch in itertools.islice(first.batches(make(sizes[0])), taken):
        seen.append(batch)
        first.progress(len(seen))
    first.save({}, taken)
    live_of(first).saves.finish()
    newest = first.checkpoint_dir / f"step-{taken:08d}.pt"
    later = of_size(tmp_path, 2, sizes[1], world_size=ranks[1], resume_checkpoint=newest)
    later.load({})
    return _flat(seen), _flat(later.batches(make(sizes[1])))


def _flat(batches):
    return [int(number) for batch in batches for number in batch]


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return iter(range(SAMPLES))
        return iter(range(worker.id, SAMPLES, worker.num_workers))


class Chunks(Dataset):
    """Makes batches itself."""

    def __init__(self, size):
        self.parts = torch.arange(SAMPLES).split(size)

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        return self.parts[index]


class Whole(Dataset):
    """Takes the indices of a whole batch."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, indices):
        return torch.tensor(indices)


class Counting:
    """A loader of one's own whose state counts batches."""

    def __init__(self, size):
        self.parts, self.at = torch.arange(SAMPLES).split(size), 0

    def __iter__(self):
        for part in self.parts[self.at :]:
            self.at += 1
            yield part
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def _loader(size, data=range(SAMPLES), **options):
    return DataLoader(data, batch_size=size, **options)


def _of_batches(size, sampler, **options):
    batches = BatchSampler(sampler, size, drop_last=False)
    return DataLoader(range(SAMPLES), batch_sampler=batches, **options)


EXACT = {
    "plain": _loader,
    "shuffled": lambda n: _loader(n, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "weighted": lambda n: _loader(
        n,
        sampler=WeightedRandomSampler(
            [1.0] * SAMPLES, SAMPLES, False, generator=torch.Generator().manual_seed(2)
        ),
    ),
    "of a rank": lambda n: _loader(
        n, sampler=DistributedSampler(range(SAMPLES), num_replicas=1, rank=0, seed=3)
    ),
    "batch_sampler=": lambda n: _of_batches(n, SequentialSampler(range(SAMPLES))),
    "batch_sampler= shuffled": lambda n: _of_batches(
        n, RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(4))
    ),
    "of whole batches": lambda n: DataLoader(
        Whole(),
        batch_size=None,
        sampler=BatchSampler(SequentialSampler(range(SAMPLES)), n, drop_last=False),
    ),
    "stream": lambda n: _loader(n, Stream()),
}
UNCERTAIN = {
    "batch_size=None": lambda n: DataLoader(Chunks(n), batch_size=None),
    "a list": lambda n: list(torch.arange(SAMPLES).split(n)),
    "a generator": lambda n: (part for part in torch.arange(SAMPLES).split(n)),
    "its own state": Counting,
}
SIZES = [(8, 4), (8, 3), (4, 8), (8, 16), (10, 16)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("make", [*EXACT.values(), *UNCERTAIN.values()], ids=[*EXACT, *UNCERTAIN])
def test_a_new_batch_size_repeats_no_sample(tmp_path, caplog, make, sizes):
    """None is left out either."""
    taken = 4 if sizes[0] == 10 else 3
    seen, rest = resumed(tmp_path, make, sizes=sizes, taken=taken)
    assert sorted(seen + rest) == list(range(SAMPLES))
    is_certain = make in EXACT.values()
    assert len(caplog.messages) == (not is_certain), caplog.messages
    if not is_certain:
        assert f"{sizes[1]} samples in a batch and {sizes[0]} before" in caplog.text


class Endless(DataLoader):
    """Begins again after each pass, with workers that stay."""

    def __iter__(self):
        return itertools.chain.from_iterable(DataLoader.__iter__(self) for _ in range(3))


def test_an_endless_loader_resumes_in_its_pass(tmp_path, caplog):
    def make(size):
        return Endless(range(SAMPLES), batch_size=size)

    seen, rest = resumed(tmp_path, make, sizes=(8, 4), taken=8)
    assert seen + rest[: SAMPLES - 16] == [*range(SAMPLES), *range(SAMPLES)]
    assert not caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_workers_keep_the_order_of_sized_datasets(tmp_path, caplog, is_kept):
    seen, rest = resumed(
        tmp_path,
        lambda size: _loader(size, num_workers=2, persistent_workers=is_kept),
        sizes=(8, 4),
        taken=3,
    )
    assert seen + rest == list(range(SAMPLES))
    assert not caplog.messages


class Buckets:
    """Neighbours make a batch; the order of the batches is shuffled."""

    def __init__(self, size):
        parts = torch.arange(SAMPLES - 1).split(size)
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
        self.parts = [parts[number].tolist() for number in order]

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


class Grouped(Sampler):
    """Draws an order that depends on the size of a batch."""

    def __init__(self, size):
        self.parts = Buckets(size)

    def __iter__(self):
        return itertools.chain.from_iterable(self.parts)

    def __len__(self):
        return SAMPLES


@pytest.mark.parametrize(
    ("make", "maker"),
    [
        (lambda n: DataLoader(range(SAMPLES), batch_sampler=Buckets(n)), "made by a Buckets"),
        (lambda n: _loader(n, sampler=Grouped(n)), "made by a Grouped"),
        (lambda n: _loader(n, Stream(), num_workers=2), "loaded by 2 in turn"),
    ],
)
def test_an_order_that_depends_on_sizes_is_announced(tmp_path, caplog, make, maker):
    """The warning comes before the batches."""
    resumed(tmp_path, make, sizes=(8, 4), taken=3)
    assert caplog.messages == [
        "run.batches: 4 samples in a batch and 8 before, so the first 24 samples of this pass are "
        f"passed over; if the order of samples ({maker}) depends on that, up to 24 are seen again "
        "and as many left out"
    ]


def test_batches_of_the_same_size_resume_silently(tmp_path, caplog):
    for maker, make in (EXACT | UNCERTAIN).items():
        seen, rest = resumed(tmp_path / maker, make, sizes=(8, 8), taken=3)
        assert sorted(seen + rest) == list(range(SAMPLES)), maker
    assert not caplog.messages


class Opaque:
    """A batch that says nothing of its samples."""

    def __init__(self, part):
        self.part = part

    def __iter__(self):
        return iter(self.part)


def test_uncountable_batches_are_skipped_and_their_samples_named(tmp_path, caplog):
    def make(size):
        return [Opaque(part) for part in torch.arange(SAMPLES).split(size)]

    seen, rest = resumed(tmp_path, make, sizes=(8, 4), taken=3)
    assert sorted({*seen} & {*rest}) == list(range(12, 24))
    (said,) = caplog.messages
    assert "samples 12 to 23 of this pass (from 0) are seen again" in said


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((8, 4), "samples 12 to 23 of this pass (from 0) are seen again"),
        ((8, 16), "samples 24 to 47 of this pass (from 0) are left out"),
    ],
)
def test_batches_that_do_not_count_samples_are_reported(tmp_path, caplog, sizes, said):
    def make(size):
        return [part.unsqueeze(0) for part in torch.arange(SAMPLES - 1).split(size)]

    run = of_size(tmp_path, 1, sizes[0])
    assert len(list(itertools.islice(run.batches(make(sizes[0])), 3))) == 3
    run.save({}, 1)
    live_of(run).saves.finish()
    newest = run.checkpoint_dir / "step-00000001.pt"
    later = of_size(tmp_path, 2, sizes[1], resume_checkpoint=newest)
    later.load({})
    next(iter(later.batches(make(sizes[1]))))
    assert said in caplog.text


def test_whole_effective_batches_are_equal_in_all_attempts(tmp_path, caplog):
    """As `run.backward` takes them: the micro-batch is another one, the loader's batch is not."""
    seen, rest = resumed(tmp_path, lambda size: UNCERTAIN["a list"](16), sizes=(8, 4), taken=2)
    assert seen + rest == list(range(SAMPLES))
    assert not caplog.messages


def test_an_uncuttable_batch_is_repeated_with_a_message(tmp_path, caplog):
    seen, rest = resumed(
        tmp_path, lambda size: _loader(size, collate_fn=Opaque), sizes=(8, 16), taken=3
    )
    assert sorted({*seen} & {*rest}) == list(range(16, 24))
    assert caplog.messages == [
        "run.batches: a batch (Opaque) cannot be cut, so its first 8 samples are seen again"
    ]


def test_an_unseeded_shuffle_is_warned_of(tmp_path, caplog):
    resumed(tmp_path, lambda size: _loader(size, shuffle=True), sizes=(8, 8), taken=3)
    (said,) = caplog.messages
    assert "in another order than before" in said
    assert "seed the loader's generator with the epoch" in said


def test_an_epoch_unset_on_a_rank_is_reported(tmp_path, caplog):
    epochs = iter([1, 0])

    def make(size):
        sampler = DistributedSampler(range(SAMPLES), num_replicas=2, rank=0)
        sampler.set_epoch(next(epochs))
        return _loader(size, sampler=sampler)

    resumed(tmp_path, make, sizes=(8, 8), taken=1, ranks=(2, 2))
    assert "call the sampler's set_epoch(epoch)" in caplog.text


def test_another_number_of_ranks_is_warned_of(tmp_path, caplog):
    resumed(tmp_path, _loader, sizes=(8, 8), taken=3, ranks=(2, 1))
    assert "1 ranks and 2 before" in caplog.text


@pytest.mark.parametrize(("sizes", "drops"), [((8, 4), False), ((16, 8), True)])
def test_a_complete_pass_is_followed_by_another(tmp_path, sizes, drops):
    taken = SAMPLES // sizes[0] if drops else -(-SAMPLES // sizes[0])
    _, rest = resumed(
        tmp_path, lambda size: _loader(size, drop_last=drops), sizes=sizes, taken=taken
    )
    assert rest[:16] == list(range(16))


def test_a_custom_loaders_pass_is_followed_by_another(tmp_path, caplog):
    """The loader was used up."""
    _, rest = resumed(tmp_path, UNCERTAIN["a list"], sizes=(8, 4), taken=6)
    assert rest == list(range(SAMPLES))
    assert not caplog.messages


def test_a_third_attempt_resumes_in_an_accumulation(tmp_path):
    """Batches of 8, then of 4 of which an odd number was done, then of 8 again."""
    path, seen = None, []
    for attempt, (size, taken) in enumerate([(8, 1), (4, 1), (8, 99)], 1):
        run = of_size(tmp_path, attempt, size, resume_checkpoint=path)
        step = run.load({})
        for batch in itertools.islice(run.batches(_loader(size)), taken):
            seen += batch.tolist()
            step += 1
        run.save({}, step)
        live_of(run).saves.finish()
        path = run.checkpoint_dir / f"step-{step:08d}.pt"
    assert seen == list(range(SAMPLES))


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12)),
    taken=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    is_list=st.booleans(),
)
def test_any_sizes_see_each_sample_once(sizes, taken, is_list):
    """The number of attempts does not matter."""
    seen, batches = [], Batches()
    for size, count in zip(sizes, (*taken, None), strict=True):
        loader = list(torch.arange(SAMPLES).split(size)) if is_list else _loader(size)
        given = batches.iterate(loader, BatchFacts(size, size, rank=1))
        seen += _flat(itertools.islice(given, count))
        batches = Batches(batches.position)
        if len(seen) == SAMPLES:
            break
    assert seen == list(range(SAMPLES))


def test_saving_before_the_first_batch_keeps_the_position(tmp_path):
    path, seen = None, []
    for attempt, taken in enumerate((2, 0, 99), 1):
        run = of_size(tmp_path, attempt, 8, resume_checkpoint=path)
        step = run.load({}) + 1
        seen += _flat(itertools.islice(run.batches(_loader(8)), taken))
        run.save({}, step)
        live_of(run).saves.finish()
        path = run.checkpoint_dir / f"step-{step:08d}.pt"
    assert seen == list(range(SAMPLES))


class Graphs:
    num_graphs = 3


def test_visible_samples_of_a_batch_are_counted():
    assert count_samples(Graphs()) == 3
    assert count_samples({"x": torch.ones(5, 2), "ids": list(range(5))}) == 5
    assert count_samples((torch.ones(5, 2), torch.ones(4))) is None
    assert count_samples(7) is None
    assert cut_first_samples(torch.ones(2), 1, range(3, 4)) is None


def test_a_loader_is_examined_without_drawing_from_it():
    before = torch.get_rng_state()
    assert examine_loader(_loader(8, shuffle=True)).size == 8
    assert torch.equal(torch.get_rng_state(), before)
    assert examine_loader(range(3)).size is None


def test_torchdatas_loader_sees_each_sample_once(tmp_path):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    for number, data in enumerate((Stream(), range(SAMPLES))):
        seen, rest = resumed(
            tmp_path / str(number),
            lambda size, data=data: loaders.StatefulDataLoader(data, batch_size=size),
            sizes=(8, 4),
            taken=3,
        )
        assert sorted(seen + rest) == list(range(SAMPLES)), data
