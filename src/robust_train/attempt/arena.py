"""Host memory for copies of tensors: a few large blocks, which each save uses again.

:class:`.host_copies.HostCopies` uses it in the process that trains. Pinned memory is expensive: the
system can neither swap nor drop it, and torch's allocator rounds each block up to a power of two
and keeps freed blocks. So the blocks are powers of two from the start, which makes
:attr:`Arena.taken` the memory that is really in use, and dropped blocks are returned to the system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from robust_train.compat import return_pinned_memory

_ALIGNMENT = 64
_SHARE_OF_A_BLOCK = 8
"""A block is about this part of the total, so that rounding up the last block costs little."""


@dataclass(frozen=True)
class Place:
    """The position of a piece: the number of its block, and the offset in bytes."""

    block: int = 0
    start: int = 0


def plan(
    sizes: Sequence[int], blocks: Sequence[int], first: Place, *, pinned: bool
) -> tuple[list[Place], list[int], Place]:
    """Lay out pieces of these sizes in turn.

    The free part of ``blocks`` begins at ``first``.

    Returns:
        The place of each piece, the sizes of all blocks then, and the place after the last piece.
    """
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
        """The total size of all blocks in bytes, used or not."""
        return sum(map(len, self._blocks))

    def more_for(self, sizes: Sequence[int]) -> int:
        """Return the additional bytes that pieces of these sizes would need."""
        _, capacities, _ = self._plan(sizes)
        return sum(capacities) - self.taken

    def take(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Return a storage of each size. A storage keeps its block, and nothing overwrites it
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
        """Free all pieces for reuse: their content is no longer needed."""
        self._next = Place()

    def trim(self) -> None:
        """Return the blocks that were not used since :meth:`begin`."""
        used = self._next.block + 1 if self._next != Place() else 0
        self._return(self._blocks[used:])

    def clear(self) -> None:
        """Return all blocks, each as soon as none of its pieces is in use."""
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
