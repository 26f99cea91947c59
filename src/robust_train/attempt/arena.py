"""Host memory for copies of tensors: a few large blocks, which each save uses again.

Pinned memory is expensive: the system can neither swap nor drop it, torch's allocator rounds each
block up to a power of two, and keeps a block that is freed. So the blocks are powers of two from
the start, which makes :attr:`Arena.taken` the memory that is really gone, and are returned to the
system when they are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from robust_train.compat import return_pinned_memory

_ALIGNMENT = 64
_SHARE_OF_A_BLOCK = 8
"""A block is about this part of all, so that rounding up the last one costs little."""


@dataclass(frozen=True)
class Place:
    """Where a piece begins: the number of its block, and bytes from there."""

    block: int = 0
    start: int = 0


def plan(
    sizes: Sequence[int], blocks: Sequence[int], first: Place, *, pinned: bool
) -> tuple[list[Place], list[int], Place]:
    """Return where pieces of these sizes go one after the other, the sizes of all blocks then, and
    the place behind the last piece. The free part of ``blocks`` begins at ``first``."""
    capacities = list(blocks)
    places: list[Place] = []
    padded = [_ALIGNMENT * max(-(-size // _ALIGNMENT), 1) for size in sizes]
    left = sum(padded)
    usual = _power_of_two(max([left // _SHARE_OF_A_BLOCK, *padded]))
    at = first
    for size in padded:
        while at.block < len(capacities) and at.start + size > capacities[at.block]:
            at = Place(at.block + 1)
        if at.block == len(capacities):
            capacities.append(min(usual, _power_of_two(left)) if pinned else left)
        places.append(at)
        at = Place(at.block, at.start + size)
        left -= size
    return places, capacities, at


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


class Arena:
    """Blocks of host memory, ``pinned`` or not, from which pieces are taken in turn."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.UntypedStorage] = []
        self._next = Place()

    @property
    def taken(self) -> int:
        """Bytes that all blocks have together, used or not."""
        return sum(map(len, self._blocks))

    def more_for(self, sizes: Sequence[int]) -> int:
        """Return the bytes that pieces of these sizes would take in addition."""
        _, capacities, _ = self._plan(sizes)
        return sum(capacities) - self.taken

    def take(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Return a storage of each size. A storage keeps its block, so that none is overwritten
        before :meth:`begin`."""
        places, capacities, behind = self._plan(sizes)
        for size in capacities[len(self._blocks) :]:
            block = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._blocks.append(block.untyped_storage())
        self._next = behind
        return [
            self._blocks[place.block][place.start : place.start + size]
            for place, size in zip(places, sizes, strict=True)
        ]

    def begin(self) -> None:
        """Give all pieces for new ones: what is in them is no longer needed."""
        self._next = Place()

    def trim(self) -> None:
        """Return the blocks that nothing was taken from since :meth:`begin`."""
        used = self._next.block + 1 if self._next != Place() else 0
        self._return(self._blocks[used:])

    def clear(self) -> None:
        """Return all blocks, each as soon as no piece of it is in use."""
        self._next = Place()
        self._return(self._blocks[:])

    def _plan(self, sizes: Sequence[int]) -> tuple[list[Place], list[int], Place]:
        blocks = list(map(len, self._blocks))
        return plan(sizes, blocks, self._next, pinned=self._pinned)

    def _return(self, blocks: list[torch.UntypedStorage]) -> None:
        if blocks:
            del self._blocks[-len(blocks) :]
            blocks.clear()
            if self._pinned:
                return_pinned_memory(torch)
