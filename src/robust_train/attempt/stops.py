"""Requests to stop or to save, which the trainer sees at the same step on all ranks.

:class:`.live.LiveAttempt` holds one :class:`Stops` in each process that trains. A request raises a
flag that the ranks share, and each rank reads the flags once per step.
"""

from __future__ import annotations

from collections.abc import Callable

from robust_train.host.votes import CHECKPOINT, STOP, Flags
from robust_train.model.events import Json

Answer = Callable[[dict[str, Json]], None]
"""Receives the reply to a request to a live run."""


class Stops:
    """Raises and reads the flags that the ranks share, and keeps the requests for a checkpoint.

    Attributes:
        is_cooperative: whether the trainer stops by itself, so that no exception needs to interrupt
            it.
        saves_on_request: whether the trainer has asked whether to save.
        has_stopped_trainer: whether the trainer has seen a request to stop.
    """

    def __init__(self, flags: Flags, rank: int) -> None:
        self.is_cooperative = False
        self.saves_on_request = False
        self.has_stopped_trainer = False
        self._flags = flags
        self._rank = rank
        self._asks_whether_to_stop = False
        self._saves_last = False
        self._checkpoint_flag_seen = 0
        self._checkpoint_answers: list[Answer] = []
        # The requests for which the trainer was asked to save, and has not saved yet.
        self._promised: list[Answer] = []

    def request_stop(self) -> None:
        """Ask the trainer to stop at its next step boundary."""
        self._flags.raise_flag(STOP)

    def note_cooperation(self) -> None:
        """Record that no exception needs to interrupt the trainer at a signal."""
        self.is_cooperative = True

    def note_question(self) -> None:
        """Record that the trainer calls ``run.should_stop``."""
        self._asks_whether_to_stop = True

    def read_stop(self) -> bool:
        """Return whether the trainer must stop now."""
        is_stopped = self._read_stop_flag()
        self.has_stopped_trainer |= is_stopped
        return is_stopped

    def _read_stop_flag(self) -> bool:
        self.is_cooperative = True
        return bool(self._flags.read_flag(STOP, self._rank))

    def note_saving(self) -> None:
        """Record that the trainer saves on request."""
        self.saves_on_request = True

    def raise_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next step boundary."""
        self._flags.raise_flag(CHECKPOINT)

    def read_checkpoint(self, *, is_writing: bool) -> bool:
        """Return whether to save now, because a checkpoint was requested or the attempt must stop.

        Args:
            is_writing: whether a checkpoint is being written in the background. This is the
                requested checkpoint, so the trainer is not asked for another.
        """
        if self._checkpoint_answers or (self._promised and not is_writing):
            self.raise_checkpoint()
        before = self._checkpoint_flag_seen
        self._checkpoint_flag_seen = self._flags.read_flag(CHECKPOINT, self._rank)
        is_due = self._checkpoint_flag_seen > before
        if self._read_stop_flag() and not self._saves_last:
            self._saves_last = True
            is_due = True
        if is_due:
            self._promised += self._checkpoint_answers
            self._checkpoint_answers = []
        return is_due

    @property
    def is_past_last_checkpoint(self) -> bool:
        """Whether the trainer has saved for a stop, but never calls ``run.should_stop``."""
        return self._saves_last and not self._asks_whether_to_stop

    def request_checkpoint(self, answer: Answer) -> None:
        """Ask for a checkpoint. ``answer`` is called with ``{"answer": …}`` or ``{"error": …}``."""
        self._checkpoint_answers.append(answer)

    def withdraw_checkpoint_request(self, answer: Answer) -> None:
        """Drop a request for which the trainer was not asked to save yet."""
        if answer in self._checkpoint_answers:
            self._checkpoint_answers.remove(answer)

    def answer_checkpoint(self, reply: dict[str, Json]) -> None:
        """Answer all requests for a checkpoint."""
        answers = self._promised + self._checkpoint_answers
        self._checkpoint_answers = []
        self._promised = []
        for answer in answers:
            answer(reply)
