"""What others ask of a live run: to stop, to save."""

from __future__ import annotations

from collections.abc import Callable

from robust_train.host.votes import CHECKPOINT, STOP, Flags
from robust_train.model.events import Json

Answer = Callable[[dict[str, Json]], None]
"""Takes the reply to a request that was made of a live run."""


class Asked:
    """What is asked of one rank of an attempt, and whether its trainer has seen it.

    Attributes:
        rank: number of this process among those that share the optimizer steps, from 0.
        is_cooperative: the trainer has read :attr:`stop_requested`.
        looks_for_checkpoint_requests: it has read :attr:`checkpoint_requested`.
        was_told_to_stop: it has seen that it is to stop.
        at_boundary: set by whoever calls the trainer; called between two steps with what the
            trainer does there.
    """

    def __init__(
        self,
        rank: int,
        flags: Flags | None,
    ) -> None:
        self.rank = rank
        self.is_cooperative = False
        self.looks_for_checkpoint_requests = False
        self.was_told_to_stop = False
        self.at_boundary: Callable[[str], None] = lambda boundary: None
        self._flags = flags
        self._checkpoint_flag_seen = 0
        self._checkpoint_answers: list[Answer] = []
        # no threading.Event: a signal's handler may interrupt itself
        self._stop_requested = False

    @property
    def stop_requested(self) -> bool:
        """Whether to save a checkpoint now and raise :class:`Interrupted`.

        A trainer that never reads this gets a KeyboardInterrupt instead. Of several ranks all have
        to read it, once a step: then they see it at the same step.
        """
        self.is_cooperative = True
        self.at_boundary("stop_requested")
        stops = self._stop_requested
        if self._flags is not None:
            stops = bool(self._flags.look(STOP, self.rank))
        self.was_told_to_stop = self.was_told_to_stop or stops
        return stops

    def request_stop(self) -> None:
        """Ask the trainer to stop at its next step boundary."""
        self._stop_requested = True
        if self._flags is not None:
            self._flags.raise_flag(STOP)

    @property
    def checkpoint_requested(self) -> bool:
        """Whether someone asks for a checkpoint now, after which training goes on."""
        self.looks_for_checkpoint_requests = True
        self.at_boundary("checkpoint_requested")
        if self._flags is not None:
            if self._checkpoint_answers:
                self._flags.raise_flag(CHECKPOINT)
            before = self._checkpoint_flag_seen
            self._checkpoint_flag_seen = self._flags.look(CHECKPOINT, self.rank)
            return self._checkpoint_flag_seen > before
        return bool(self._checkpoint_answers)

    def request_checkpoint(self, answer: Answer) -> None:
        """Ask for a checkpoint; ``answer`` gets ``{"answer": …}`` or ``{"error": …}``."""
        self._checkpoint_answers.append(answer)

    def withdraw_checkpoint_request(self, answer: Answer) -> None:
        """Forget a request, where it was not answered yet."""
        if answer in self._checkpoint_answers:
            self._checkpoint_answers.remove(answer)

    def answer_checkpoint(self, reply: dict[str, Json]) -> None:
        """Answer all requests for a checkpoint."""
        answers, self._checkpoint_answers = self._checkpoint_answers, []
        for answer in answers:
            answer(reply)
