"""Which samples come next, and what Lightning's counters say of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from robust_train.integrations.lightning_position import LightningPosition
from robust_train.integrations.sample_order import SampleOrder, StepShares, take_over
from robust_train.model.errors import UserError


@given(
    length=st.integers(1, 60),
    epoch=st.integers(0, 5),
    skip=st.integers(0, 60),
    seed=st.integers(0, 2**40),
    noise=st.integers(0, 2**31),
)
def test_the_order_depends_on_seed_and_epoch_alone(length, epoch, skip, seed, noise):
    order = SampleOrder(RandomSampler(range(length)), seed=seed)
    epochs = [list(order) for _ in range(epoch + 1)]

    torch.manual_seed(noise)
    state = torch.get_rng_state()
    resumed = SampleOrder(RandomSampler(range(length)), seed=seed)
    resumed.begin(epoch, skip)
    assert list(resumed) == epochs[epoch][skip:]
    assert sorted(epochs[epoch]) == list(range(length))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_samplers_own_generator_is_ordered_too():
    def order(noise):
        generator = torch.Generator().manual_seed(noise)
        return SampleOrder(WeightedRandomSampler([1.0] * 50, 50, generator=generator), seed=7)

    first, again = order(1), order(2)
    next(iter(again))
    again.begin(0)
    assert list(first) == list(again)
    assert list(first) == list(again)
    # somebody else may have added one, too
    plain, added = RandomSampler(range(50)), RandomSampler(range(50), generator=torch.Generator())
    assert list(SampleOrder(plain, seed=7)) == list(SampleOrder(added, seed=7))


def test_resumed_workers_draw_the_same_numbers():
    """The workers of a loader, in a resumed epoch."""

    def numbers(noise, epoch):
        torch.manual_seed(noise)
        loader = DataLoader(_Random(), 2, shuffle=True, num_workers=2)
        take_over(loader, name="loader", shares=StepShares(2), seed=1).begin(epoch)
        return torch.cat(list(loader)).tolist()

    assert numbers(1, 3) == numbers(2, 3)
    assert numbers(1, 3) != numbers(1, 4)


class _Random(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1)


class _Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ([1, 2], "is a list"),
        (DataLoader(_Endless(), 4), "needs a map-style data set"),
        (DataLoader(range(8), batch_sampler=[[0, 1]]), "needs a map-style data set"),
        (DataLoader(range(3), 4, drop_last=True), "3 samples are too few for a step of 4"),
        (DataLoader(range(8), 5), "makes batches of 5, but this attempt uses 4"),
        (
            DataLoader(range(8), 4, sampler=DistributedSampler(range(8), num_replicas=2, rank=0)),
            "its DistributedSampler divides",
        ),
    ],
)
def test_an_unresumable_loader_is_refused_in_one_line(loader, said):
    with pytest.raises(UserError, match=said) as refused:
        take_over(loader, name="train_dataloader", shares=StepShares(4), seed=0)
    assert str(refused.value).startswith("train_dataloader: ")
    assert "\n" not in str(refused.value)


SPLITS = {
    "length": st.integers(1, 200),
    "micro_batch": st.integers(1, 6),
    "accumulation": st.integers(1, 4),
    "ranks": st.integers(1, 4),
}


@given(**SPLITS)
def test_any_split_has_the_same_samples(length, micro_batch, accumulation, ranks):
    whole = StepShares(micro_batch * accumulation * ranks)
    shares = [StepShares(micro_batch, accumulation, rank, ranks) for rank in range(ranks)]
    assert list(shares[0].steps(length)) == list(whole.steps(length))
    for step in whole.steps(length):
        samples = [share.share(step) for share in shares]
        assert set().union(*samples) == set(step)
        counts_of_parts = {-(-len(mine) // micro_batch) for mine in samples}
        assert len(counts_of_parts) == 1, "all ranks come to their collectives equally often"
    orders = [SampleOrder(range(length), seed=1, shares=share) for share in shares]
    assert {len(order) - len(list(order)) for order in orders} == {0}


@given(**SPLITS)
def test_every_sample_of_a_step_counts_the_same(length, micro_batch, accumulation, ranks):
    for step in StepShares(micro_batch * accumulation * ranks).steps(length):
        counted = dict.fromkeys(step, 0.0)
        for rank in range(ranks):
            shares = StepShares(micro_batch, accumulation, rank, ranks)
            mine = shares.share(step)
            for number, start in enumerate(range(0, len(mine), micro_batch)):
                part = mine[start : start + micro_batch]
                weight = shares.weight(step, number)
                for sample in part:
                    # the framework divides by the accumulation and averages over the ranks
                    counted[sample] += weight / accumulation / ranks / len(part)
                if len(step) == shares.effective:
                    assert weight == 1
        assert list(counted.values()) == pytest.approx([1 / len(step)] * len(step))


@given(**SPLITS, start=st.integers(0, 200))
def test_a_changed_effective_batch_ends_like_frameworks(
    length, micro_batch, accumulation, ranks, start
):
    """The last step is where the framework ends."""
    shares = StepShares(micro_batch, accumulation, 0, ranks)
    start = min(start, length)
    steps = list(shares.steps(length, start))
    assert [sample for step in steps for sample in step] == list(range(start, length))
    position = LightningPosition(samples=start, epoch_samples=length)
    done = position.count_done(shares.at_once)
    for step in steps[:-1]:
        done += shares.micro_batches(step)
        assert done % accumulation == 0
