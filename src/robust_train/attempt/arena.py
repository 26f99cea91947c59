"""Host memory for copies of tensors, in a few large blocks that each save reuses.

:class:`.host_copies.HostCopies` uses it in the process that trains. Each copy gets a piece of a
block. For example, three tensors of 100, 200 and 300 MiB may share one block of 1 GiB.

Pinned memory is expensive: the system can neither swap nor drop it, and torch's allocator rounds
each block up to a power of two and keeps freed blocks. So the blocks of a pinned arena are powers
of two, which makes :attr:`Arena.taken` the memory that is actually in use, and dropped blocks are
returned to the system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from robust_train.compat import return_pinned_memory

_ALIGNMENT_BYTES = 64
_BLOCKS = 8
"""The approximate number of blocks of a save. With several blocks, rounding up costs little."""


@dataclass(frozen=True)
class PieceStart:
    """The start of a piece: the number of its block, and the offset in bytes."""

    block: int = 0
    offset: int = 0


@dataclass(frozen=True)
class PiecePlan:
    """The result of `plan_pieces`."""

    starts: list[PieceStart]  # the start of each piece
    blocks: list[int]  # the sizes of the existing and the new blocks
    end: PieceStart  # the start of the free part of the blocks, after the last piece


def plan_pieces(
    sizes: Sequence[int], blocks: Sequence[int], first: PieceStart, *, pinned: bool
) -> PiecePlan:
    """Place pieces of these sizes one after another, and add blocks if necessary.

    Args:
        sizes: the sizes of the pieces in bytes.
        blocks: the sizes of the existing blocks.
        first: the start of the free part of the blocks.
        pinned: new blocks are powers of two. Otherwise one new block takes all remaining pieces.
    """
    capacities = list(blocks)
    starts: list[PieceStart] = []
    padded = [_pad(size) for size in sizes]
    left = sum(padded)
    usual = _round_up_to_power_of_two(max([left // _BLOCKS, *padded]))
    at = first
    for size in padded:
        while at.block < len(capacities) and at.offset + size > capacities[at.block]:
            at = PieceStart(at.block + 1)
        if at.block == len(capacities):
            capacity = left
            if pinned:
                capacity = min(usual, _round_up_to_power_of_two(left))
            capacities.append(capacity)
        starts.append(at)
        at = PieceStart(at.block, at.offset + size)
        left -= size
    return PiecePlan(starts, capacities, at)


def _pad(size: int) -> int:
    """Round a size up to a multiple of the alignment. An empty piece gets a place too."""
    return _ALIGNMENT_BYTES * max(-(-size // _ALIGNMENT_BYTES), 1)


def _round_up_to_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


class Arena:
    """Blocks of host memory, ``pinned`` or not, from which pieces are taken one after another."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.UntypedStorage] = []
        self._next = PieceStart()

    @property
    def taken(self) -> int:
        """The total size of all blocks in bytes, used or not."""
        return sum(map(len, self._blocks))

    def bytes_to_add(self, sizes: Sequence[int]) -> int:
        """Return the size of the blocks that pieces of these sizes need in addition."""
        return sum(self._plan(sizes).blocks) - self.taken

    def take(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Return a storage of each size. Nothing overwrites a storage before :meth:`begin`, and its
        block exists as long as the storage does."""
        plan = self._plan(sizes)
        for size in plan.blocks[len(self._blocks) :]:
            block = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._blocks.append(block.untyped_storage())
        self._next = plan.end
        return [
            self._blocks[start.block][start.offset : start.offset + size]
            for start, size in zip(plan.starts, sizes, strict=True)
        ]

    def begin(self) -> None:
        """Free all pieces for reuse, because their content is no longer needed."""
        self._next = PieceStart()

    def trim(self) -> None:
        """Return the blocks that were not used since :meth:`begin` to the system."""
        used = self._next.block + 1 if self._next != PieceStart() else 0
        self._return(self._blocks[used:])

    def clear(self) -> None:
        """Return all blocks to the system, each as soon as its last piece is no longer in use."""
        self._next = PieceStart()
        self._return(self._blocks[:])

    def _plan(self, sizes: Sequence[int]) -> PiecePlan:
        blocks = list(map(len, self._blocks))
        return plan_pieces(sizes, blocks, self._next, pinned=self._pinned)

    def _return(self, blocks: list[torch.UntypedStorage]) -> None:
        if blocks:
            del self._blocks[-len(blocks) :]
            blocks.clear()
            if self._pinned:
                return_pinned_memory(torch)
