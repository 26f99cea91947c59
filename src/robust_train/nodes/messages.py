"""What the launchers of a job's nodes send each other: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from robust_train.files import Json, MalformedEvent, as_json, from_json
from robust_train.values import AttemptSpec, Clue, Failure, FailureKind


@dataclass(frozen=True)
class Message:
    """Base of all messages; ``say`` is the message's name in JSON."""

    say: ClassVar[str]


@dataclass(frozen=True)
class Challenge(Message):
    """Leader: prove with this that you know the secret."""

    say = "challenge"
    nonce: str


@dataclass(frozen=True)
class Hello(Message):
    """Follower: who it is, and what it was started with."""

    say = "hello"
    node: int
    host: str
    proof: str
    nonce: str  # for the leader's own proof
    versions: Mapping[str, str]
    config: Mapping[str, str]  # of the job, by dotted key


@dataclass(frozen=True)
class Welcome(Message):
    """Leader: the follower belongs to the job."""

    say = "welcome"
    proof: str


@dataclass(frozen=True)
class Reserve(Message):
    """Leader: reserve GPUs on your host, wait for them if need be, and import the libraries."""

    say = "reserve"


@dataclass(frozen=True)
class Reserved(Message):
    """Follower: the GPUs that it has, none for the CPU; or why it has none."""

    say = "reserved"
    gpus: tuple[str, ...] = ()
    problem: str | None = None
    is_refusal: bool = False  # the trainer refuses the config


@dataclass(frozen=True)
class Begin(Message):
    """Leader: run your ranks of an attempt."""

    say = "begin"
    number: int
    spec: AttemptSpec  # with the GPUs of nobody
    job: str
    port: int  # of the ranks' store, on the leader's host
    checkpoint: str | None = None  # relative to the run folder where it lies there


@dataclass(frozen=True)
class Reported(Message):
    """Follower: an event of one of its ranks."""

    say = "reported"
    event: Mapping[str, Json]


@dataclass(frozen=True)
class Ended(Message):
    """Follower: its ranks have ended, and how."""

    say = "ended"
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
    def order(self) -> int:
        """Smaller for what rather was the cause than a consequence."""
        failure = self.failure
        if failure is None or (self.was_ended and failure.evidence.clue == Clue.KILLED):
            return 9
        by_kernel = failure.kind is FailureKind.HOST_OOM and failure.evidence.library == "kernel"
        if self.refusal is not None or by_kernel or failure.evidence.clue == Clue.KILLED:
            return 0
        return 3 if failure.kind in (FailureKind.COMM, FailureKind.INTERRUPTED) else 1


def root_of(ends: tuple[Ended, ...], ranks: int) -> Ended | None:
    """Return the end that the others followed from, the earliest of several; None if all completed.

    A report that names a rank of another node (each has ``ranks``) was heard from there.
    """

    def order(end: Ended) -> tuple[int, int]:
        rank = None if end.failure is None else end.failure.rank
        is_heard = end.order == 1 and rank is not None and rank // ranks != end.node
        return (2 if is_heard else end.order), ends.index(end)

    return min((end for end in ends if end.failure is not None), key=order, default=None)


@dataclass(frozen=True)
class End(Message):
    """Leader: the attempt has failed elsewhere; end your ranks after so long."""

    say = "end"
    seconds: float


@dataclass(frozen=True)
class Stop(Message):
    """Either: this signal asks the job to stop."""

    say = "stop"
    signum: int


@dataclass(frozen=True)
class Done(Message):
    """Leader: the job has ended, or the follower is refused; as ``summary.json`` has it."""

    say = "done"
    status: str
    exit_code: int
    reason: str | None = None


_CLASSES = {cls.say: cls for cls in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return the line of a message."""
    return json.dumps({"say": message.say, **as_json(message)}, default=repr).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in a line; MalformedEvent: it is none."""
    try:
        data = json.loads(line)
        return from_json(_CLASSES[data["say"]], data)
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise MalformedEvent(f"{type(error).__name__}: {error}") from error
