"""What a job's trainer can do by its kind, and what is left to its launcher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What the launcher may expect of a trainer.

    A function is called by the attempt's own interpreter. A program may be anything that can be
    started: it is given what its command names, and known by its output and its files alone.
    """

    # started by the attempt, as a process of its own: tensors, threads and exceptions are there
    is_program: bool
    # the attempt's micro-batch and accumulation reach it, whatever its command says
    has_batch: bool
    accumulates: bool
    # a search may have it compute single steps of any size
    can_be_probed: bool
    # it raises exceptions; otherwise only an exit code and the output show how it failed
    raises: bool
    # it starts a process for each GPU; otherwise the launcher does
    starts_ranks: bool
    # a scheduler's signal to every process of the job reaches it as well
    takes_signals: bool
    # it imports the packages that are installed here
    shares_packages: bool
    # it reads UUIDs in CUDA_VISIBLE_DEVICES; many programs parse integers
    reads_uuids: bool
    # expandable segments break nothing that it may contain, such as vLLM
    takes_expandable_segments: bool
    # it has data-loader workers whose number the launcher sets
    has_our_workers: bool
    # it writes checkpoints of its own, in which it finds its place in the data
    saves_by_itself: bool
    # it accumulates by itself, and divides the loss by itself
    accumulates_by_itself: bool

    def interpreters(self, gpus: int) -> int:
        """Return how many attempt interpreters run it on this many GPUs."""
        return 1 if self.starts_ranks else gpus


FUNCTION = Traits(
    is_program=False,
    has_batch=True,
    accumulates=True,
    can_be_probed=True,
    raises=True,
    starts_ranks=False,
    takes_signals=False,
    shares_packages=True,
    reads_uuids=True,
    takes_expandable_segments=True,
    has_our_workers=True,
    saves_by_itself=False,
    accumulates_by_itself=False,
)

PROGRAM = Traits(
    is_program=True,
    has_batch=False,
    accumulates=False,
    can_be_probed=False,
    raises=False,
    starts_ranks=True,
    takes_signals=True,
    shares_packages=False,
    reads_uuids=False,
    takes_expandable_segments=False,
    has_our_workers=False,
    saves_by_itself=True,
    accumulates_by_itself=True,
)
