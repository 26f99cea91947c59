"""What the launchers of a job's nodes send each other, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from robust_train.execution.stall import Standstill
from robust_train.files import Json, MalformedEvent, as_json, from_json
from robust_train.values import AttemptSpec, Clue, Failure, FailureKind


@dataclass(frozen=True)
class Message:
    """Base of all messages."""


@dataclass(frozen=True)
class Hello(Message):
    """Follower: who it is, and what it was started with; the config by dotted key."""

    node: int
    host: str
    started_with: Mapping[str, str]
    machine: str = ""  # on which it is, whatever a container calls it
    refusal: str | None = None  # why it cannot follow


@dataclass(frozen=True)
class Reserve(Message):
    """Leader: reserve GPUs on your host, wait for them if need be, and import the libraries."""


@dataclass(frozen=True)
class Reserved(Message):
    """Follower: its GPUs, none for the CPU; or why it has none, or refuses the config."""

    gpus: tuple[str, ...] = ()
    problem: str | None = None
    refuses: bool = False


@dataclass(frozen=True)
class Begin(Message):
    """Leader: run your ranks of an attempt."""

    number: int
    spec: AttemptSpec  # without GPUs
    job: str
    port: int  # of the ranks' store, on the leader's host
    checkpoint: str | None = None  # relative to the run folder where it lies there


@dataclass(frozen=True)
class Reported(Message):
    """Follower: an event of one of its ranks."""

    event: Mapping[str, Json]


@dataclass(frozen=True)
class Ended(Message):
    """Follower: its ranks have ended, and how."""

    number: int  # of the attempt
    failure: Failure | None = None
    was_ended: bool = False  # because of what happened on another node
    others_know: bool = False  # the other ranks end by themselves, after a last checkpoint
    traceback: str | None = None
    exceptions: tuple[str, ...] = ()
    output: str = ""
    refusal: str | None = None  # the trainer refuses the config
    node: int = 0
    host: str = ""

    @property
    def is_sudden(self) -> bool:
        """Whether it failed so that ranks of other nodes would wait for ever."""
        if self.failure is None or self.others_know:
            return self.refusal is not None
        return self.failure.kind is not FailureKind.INTERRUPTED or self.was_killed

    @property
    def was_killed(self) -> bool:
        """Whether a rank was killed, by whom ever: it reports nothing."""
        failure = self.failure
        if failure is None or failure.evidence.clue == Clue.KILLED:
            return failure is not None
        return failure.kind is FailureKind.HOST_OOM and failure.evidence.library == "kernel"


def root_of(ends: tuple[Ended, ...], ranks: int) -> Ended | None:
    """Return the end that the others followed from, the first of several; None if none failed.

    What names a rank of another node was sent from there; each has ``ranks``.
    """

    def order(end: Ended) -> int:
        assert end.failure is not None
        if end.was_killed:
            # what is ended for others is the whole attempt, not one of its ranks
            return 4 if end.was_ended and end.failure.rank is None else 0
        if end.failure.kind in (FailureKind.COMM, FailureKind.INTERRUPTED):
            return 3
        is_own = end.failure.rank is None or end.failure.rank // ranks == end.node
        return 1 if is_own else 2

    return min((end for end in ends if end.failure is not None), key=order, default=None)


@dataclass(frozen=True)
class End(Message):
    """Leader: the attempt has failed elsewhere; end your ranks after so long."""

    seconds: float


@dataclass(frozen=True)
class Hang(Message):
    """Leader: the attempt hangs; end your ranks, after they have written their stacks."""

    found: Standstill


@dataclass(frozen=True)
class Stop(Message):
    """Either: this signal asks the job to stop."""

    signum: int


@dataclass(frozen=True)
class Done(Message):
    """Leader: the job has ended, as ``summary.json`` has it."""

    status: str
    exit_code: int
    reason: str | None = None


_CLASSES = {cls.__name__: cls for cls in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return a message as it is sent."""
    return json.dumps({"say": type(message).__name__, **as_json(message)}, default=repr).encode()


def decode(data: bytes) -> Message:
    """Return a message that was sent; MalformedEvent: it is none."""
    try:
        found = json.loads(data)
        return from_json(_CLASSES[found["say"]], found)
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise MalformedEvent(f"{type(error).__name__}: {error}") from error
