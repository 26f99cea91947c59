"""Copies for checkpoints: their host memory is counted as it is taken, used again and returned."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_train.attempt import host_copies
from robust_train.attempt.arena import Arena, PieceStart, plan_pieces
from robust_train.attempt.host_copies import HostCopies
from robust_train.readable import GIB, MIB

FLOATS = 4
SEVEN_BILLION = [(32000, 4096)] * 2 + ([(4096, 4096)] * 4 + [(11008, 4096)] * 3) * 32
VISION = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12


def power_of_two(size):
    return 1 << (size - 1).bit_length()


class PinnedMemory:
    """torch's allocator of pinned memory: it rounds up to a power of two, and keeps what is freed
    until it is told to return it."""

    def __init__(self, monkeypatch):
        self.live, self.cached, self.served = [], [], 0
        self.empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.take)
        monkeypatch.setattr(torch._C, "_host_emptyCache", self.cached.clear)

    def take(self, *sizes, pin_memory=False, **options):
        block = self.empty(*sizes, **options)
        if pin_memory:
            size = power_of_two(block.nbytes)
            if size in self.cached:
                self.cached.remove(size)
            storage = block.untyped_storage()
            self.live.append(size)
            weakref.finalize(storage, self._free, size)
        return block

    def _free(self, size):
        self.live.remove(size)
        self.cached.append(size)

    @property
    def taken(self):
        gc.collect()
        return sum(self.live) + sum(self.cached)


@pytest.fixture
def pinned(monkeypatch):
    return PinnedMemory(monkeypatch)


@pytest.fixture
def copies():
    """Copies whose tensors are taken for those of a GPU, in pinned memory."""
    pinned = HostCopies()
    pinned.arenas[False] = Arena(pinned=True)
    return pinned


def saved(copies, content):
    copies.begin()
    copied = copies.copy(content)
    assert all(torch.equal(copied[name], content[name]) for name in content)


def test_pinned_memory_is_counted_as_it_is_taken(pinned, copies):
    for number in range(5):
        saved(copies, {f"adapter_{number}": torch.rand(3 << 18), "rest": torch.rand(5000)})
        assert copies.arenas[False].taken == pinned.taken, f"save {number}"
        copies.shrink()
        assert copies.arenas[False].taken == pinned.taken, f"save {number}, shrunk"
    assert pinned.taken <= 4 * MIB, "names that are gone keep nothing"


def test_pinned_memory_is_returned_if_others_need_it(pinned, copies, monkeypatch):
    saved(copies, {"weights": torch.rand(1 << 18)})
    copies.shrink()
    assert pinned.taken == MIB
    monkeypatch.setattr(host_copies, "LARGEST_COPY", 0.0)
    copies.shrink()
    assert pinned.taken == 0


def test_a_copy_that_fails_returns_its_pinned_memory(pinned, copies, monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "copy_", fails)
    assert copies.copy({"weights": torch.rand(1 << 18)}) is None
    assert pinned.taken == 0


def test_a_save_that_becomes_smaller_returns_the_rest(pinned, copies):
    saved(copies, {f"layer{n}": torch.rand(1 << 18) for n in range(16)})
    saved(copies, {"layer0": torch.rand(1 << 18)})
    copies.shrink()
    assert pinned.taken <= 2 * MIB


def test_files_of_a_save_never_overwrite_each_other(copies, pinned):
    copies.begin()
    content = [{f"file{n}": torch.rand(1000)} for n in range(3)]
    copied = [copies.copy(tensors) for tensors in content]
    for before, after in zip(content, copied, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("shapes", [SEVEN_BILLION, VISION], ids=["7 billion", "vision"])
def test_blocks_of_a_large_model_waste_little(shapes):
    sizes = [FLOATS * torch.Size(shape).numel() for shape in shapes]
    blocks = plan_pieces(sizes, [], PieceStart(), pinned=True).blocks
    assert sum(map(power_of_two, sizes)) > 1.3 * sum(sizes), "a block for each tensor"
    assert sum(map(power_of_two, blocks)) < 1.05 * sum(sizes)


SIZES = st.lists(st.integers(0, 3 * GIB), max_size=30)


@given(st.lists(SIZES, min_size=1, max_size=4), st.booleans())
def test_pieces_lie_apart_within_their_blocks(saves, pinned):
    blocks, first, taken = [], PieceStart(), []
    for sizes in saves:
        plan = plan_pieces(sizes, blocks, first, pinned=pinned)
        blocks = plan.blocks
        first = plan.end
        taken += zip(plan.starts, sizes, strict=True)
    ends = {}
    for start, size in taken:
        assert start.offset >= ends.get(start.block, 0)
        assert start.offset % 64 == 0
        ends[start.block] = start.offset + size
        assert ends[start.block] <= blocks[start.block]
    if pinned:
        assert all(block == power_of_two(block) for block in blocks)


def test_a_sparse_tensor_and_strides_are_copied():
    content = {
        "rows": torch.rand(3, 4).t(),
        "images": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "none": torch.zeros(0),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.rand(2, dtype=torch.cfloat).conj(),
    }
    copied = HostCopies().copy(content)
    assert copied["rows"].stride() == content["rows"].stride()
    assert copied["images"].is_contiguous(memory_format=torch.channels_last)
    for name, tensor in content.items():
        assert torch.equal(copied[name].to_dense(), tensor.to_dense())


def test_memory_unused_by_any_save_is_returned():
    arena = Arena(pinned=False)
    arena.take([1000])
    arena.begin()
    arena.trim()
    assert arena.taken == 0
