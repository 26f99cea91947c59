"""The abilities of each kind of trainer, and the tasks that it leaves to the launcher. Pure.

``RobustConfig.traits`` has the traits of the job's trainer: `FUNCTION`, which a project's keys may
limit, or `PROGRAM`. The launcher, the policy, the features and the attempt's interpreter read them
there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """The launcher's expectations of a trainer.

    A function is called by the attempt's own interpreter. A program may be anything that can be
    started. It gets only the values that its command names, and only its output and its files are
    visible.
    """

    # Whether it runs in a separate process, which has its tensors, threads and exceptions.
    is_program: bool
    # Whether the attempt's micro-batch and accumulation reach it, whatever its command says.
    has_batch: bool
    accumulates: bool
    # Whether a search may let it compute single steps of any size.
    can_be_probed: bool
    # Whether it raises exceptions. Otherwise only its exit code and output show how it failed.
    raises: bool
    # Whether it starts a process for each GPU. Otherwise the launcher does.
    starts_ranks: bool
    # Whether a scheduler's signal to every process of the job reaches it as well.
    takes_signals: bool
    # Whether it imports the packages that are installed here.
    shares_packages: bool
    # Whether it reads UUIDs in CUDA_VISIBLE_DEVICES. Many programs parse integers.
    reads_uuids: bool
    # Whether expandable segments are safe for everything that it may contain, such as vLLM.
    takes_expandable_segments: bool
    # Whether it has data-loader workers whose number the launcher sets.
    has_our_workers: bool
    # Whether it writes its own checkpoints, in which it finds its place in the data.
    saves_by_itself: bool
    # Whether it accumulates by itself, and divides the loss by itself.
    accumulates_by_itself: bool

    def count_interpreters(self, gpus: int) -> int:
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
