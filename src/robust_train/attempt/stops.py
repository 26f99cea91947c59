"""Requests to stop or to save a checkpoint, which all ranks see at the same step.

Each process that trains has one :class:`Stops`, held by :class:`.live.LiveAttempt`. A request
raises a flag that the ranks share, and each rank reads the flags once per step.
"""

from __future__ import annotations

from collections.abc import Callable

from robust_train.host.votes import CHECKPOINT, STOP, Flags
from robust_train.model.events import Json

Answer = Callable[[dict[str, Json]], None]
"""Sends the reply to whoever requested a checkpoint from a live run."""


class Stops:
    """Raises and reads the flags that the ranks share, and keeps the requests for a checkpoint.

    A request for a checkpoint first waits until the trainer is asked to save, and then until it has
    saved. :meth:`answer_checkpoint` replies to all requests.

    Attributes:
        is_cooperative: whether the trainer stops by itself, so that no exception needs to interrupt
            it.
        saves_on_request: whether the trainer calls ``run.should_save``.
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
        # Requests for which the trainer was asked to save, but has not saved yet.
        self._promised: list[Answer] = []

    def request_stop(self) -> None:
        """Ask the trainer to stop at its next step boundary."""
        self._flags.raise_flag(STOP)

    def note_cooperation(self) -> None:
        """Record that the trainer stops by itself, so that no exception needs to interrupt it."""
        self.is_cooperative = True

    def note_question(self) -> None:
        """Record that the trainer calls ``run.should_stop``."""
        self._asks_whether_to_stop = True

    def read_stop(self) -> bool:
        """Return whether the trainer must stop now, and record the answer."""
        is_stopped = self._read_stop_flag()
        self.has_stopped_trainer |= is_stopped
        return is_stopped

    def _read_stop_flag(self) -> bool:
        self.is_cooperative = True
        return bool(self._flags.read_flag(STOP, self._rank))

    def note_saving(self) -> None:
        """Record that the trainer calls ``run.should_save``."""
        self.saves_on_request = True

    def raise_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next step boundary."""
        self._flags.raise_flag(CHECKPOINT)

    def read_checkpoint(self, *, is_writing: bool) -> bool:
        """Return whether to save now, because a checkpoint or a stop was requested.

        Args:
            is_writing: whether a checkpoint is being written in the background. It will satisfy
                the requests, so the trainer is not asked for another.
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
        """Drop a request, unless the trainer has already been asked to save for it."""
        if answer in self._checkpoint_answers:
            self._checkpoint_answers.remove(answer)

    def answer_checkpoint(self, reply: dict[str, Json]) -> None:
        """Send the same reply to all requests for a checkpoint."""
        answers = self._promised + self._checkpoint_answers
        self._checkpoint_answers = []
        self._promised = []
        for answer in answers:
            answer(reply)
