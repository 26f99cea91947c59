"""Standing in the host's line for a GPU: the effects around the scheduler.

One waiter looks at the GPUs for all who see no more than it does; the others sleep until the one
before them moves on, or until somebody rings because the plan has a GPU for them. Every grant is
decided by the job that gets it, inside the ledger lock, on a fresh look at the GPUs, and is in its
record before the lock is let go: all the GPUs of a job in one write.

A waiter that was stopped (Ctrl-Z) keeps its ticket but holds nobody up: one who looks for others
and gives no sign of life is not relied on, and one who does not come when called is passed over.
The same goes for one whose driver hangs: it has let go of the lock by then, and says that it sees
nothing, so others look for themselves. Whoever has not asked the driver lately does so before it
takes the lock, so that a driver that hangs mostly does so without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from robust_train.gpu.visible import Visible
from robust_train.queue.census import as_waiter, census
from robust_train.queue.inotify import ATTRIBUTES, CLOSED_AFTER_WRITE, LOST, MODIFIED, Watch
from robust_train.queue.records import JobRecord, JobState
from robust_train.queue.reservations import (
    BELL_PREFIX,
    PREFIX,
    Entry,
    Ledger,
    LedgerBusy,
    Reservation,
    boottime,
)
from robust_train.queue.scheduler import Holding, Plan, Waiter, plan, why_not
from robust_train.values import GpuInfo, Group

_LOCK_SECONDS = 2.0
_SETTLE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.6
_LOOK_SECONDS = 0.1
_CALL_SECONDS = 5.0
_TRUST_SECONDS = 5.0
_SILENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Turn:
    """How a job stands after a look.

    Attributes:
        gpus: what it has now, ``free_bytes`` as far as it can count on them; none: wait on.
        position: its place in line, 1 for the first.
        obstacles: why it waits, in one sentence.
        frees_next: NVML's numbers of the GPUs that the head of the line waits for.
        strangers_only: no other job of ours has anything to do with it.
        again_seconds: when to look again, though nothing tells; None: at the usual interval.
    """

    gpus: Group = ()
    position: int = 1
    obstacles: str = ""
    frees_next: tuple[int, ...] = ()
    strangers_only: bool = False
    again_seconds: float | None = None


class Line:
    """One job's place in line, from its first look until it has a GPU or leaves.

    Args:
        ledger: the host's jobs.
        record: what this job says of itself.
        place: the ticket that it took before, where it comes back.
        patience_seconds: how long one who looks for others may give no sign of life.
    """

    def __init__(
        self,
        ledger: Ledger,
        record: JobRecord,
        place: Reservation | None = None,
        patience_seconds: float = 65.0,
    ) -> None:
        self.ledger = ledger
        self.reservation = place
        self._template = record
        self._directory = ledger.directory
        self._watch = Watch(self._directory.fd)
        self._watched: dict[int, str] = {}  # what each watch is for: "", a predecessor, my bell
        self._leader: str | None = None
        self._polls = True
        self._rung = True
        self._bell_seen = -1
        self._known: list[Entry] = []
        self._seen: tuple[GpuInfo, ...] = ()
        self._patience_seconds = patience_seconds
        self._signs: dict[str, tuple[int, float]] = {}  # of life: a file's time, and when I saw it
        self._called: dict[str, tuple[float, int]] = {}  # whom: when, and its last sign by then
        self._answered_at = -math.inf
        self._silence: Visible | None = None  # how it looks while the driver hangs
        self._settle_until = 0.0
        self._pause = _FIRST_PAUSE_SECONDS

    @property
    def fd(self) -> int | None:
        """Becomes readable when :meth:`woken` has something to say; None: ask it often."""
        return self._watch.fd

    @property
    def slice_seconds(self) -> float:
        """How long to sleep at most before :meth:`woken` is asked."""
        return 3600.0 if self._watch.fd is not None else _LOOK_SECONDS

    def look(self, read: Callable[[], Visible], suits: Callable[[GpuInfo], bool]) -> Turn:
        """Take the GPUs if it is this job's turn, or tell why it is not.

        Args:
            read: looks at the GPUs.
            suits: whether the job may use a GPU at all.

        Raises:
            QueueProblem: the queue directory cannot be used any more.
        """
        decided = None
        while decided is None:
            if (self._polls or self._rung) and not self._is_trusted():
                self._note_answer(read())
            try:
                with self.ledger.locked(_LOCK_SECONDS):
                    decided = self._decide(read, suits)
            except LedgerBusy as error:
                return Turn(obstacles=str(error), again_seconds=_LONGEST_PAUSE_SECONDS)
        turn, called = decided
        for name in called:
            self.ledger.ring(name)
        return turn if turn.gpus else replace(turn, again_seconds=self._again())

    def woken(self) -> bool:
        """Whether something happened that makes a look worth while."""
        if self._watch.fd is None:
            return self._has_changed()
        due = False
        for watched, events, name in self._watch.read():
            if watched not in self._watched and watched != LOST:
                continue  # of a watch that was dropped
            if name and (not name.startswith(PREFIX) or self._is_mine(name)):
                continue
            if events & CLOSED_AFTER_WRITE:
                # the lock goes a moment after this, and the memory up to some seconds later
                self._begin_to_settle()
            if events & ATTRIBUTES or watched == LOST:
                self._rung = True
            due = True
        return due

    def leave(self) -> None:
        """Give the place up, or, with GPUs, just stop watching the line."""
        self._watch.close()
        reservation = self.reservation
        if reservation is None:
            return
        self.ledger.directory.remove(_bell_of(reservation.name))
        if reservation.record.state is JobState.WAITING:
            reservation.release()
            self.reservation = None

    def _decide(
        self, read: Callable[[], Visible], suits: Callable[[GpuInfo], bool]
    ) -> tuple[Turn, list[str]] | None:
        """My turn, and the names of those whose turn it is as well; under the ledger lock.

        None where the driver has to be asked without the lock first.
        """
        if self.ledger.directory is not self._directory:  # it was removed and made again
            self._directory = self.ledger.directory
            self._watch.close()
            self._watch = Watch(self._directory.fd)
            self._watched, self._leader = {}, None
        entries = self.ledger.entries(sweep=True)
        me = self._be_in_line(entries)
        ahead = [entry for entry in entries if _waits(entry) and entry.ticket < me.record.ticket]
        me.give_sign()
        # a newcomer may find a GPU at its first look, and then needs to watch nothing
        if self._seen and self._follow(ahead, me):
            entries = self.ledger.entries()
        self._known = self._without_me(entries)
        if not self._polls and not self._rung:
            return self._turn_unseen(entries, me, len(ahead)), []
        if self._silence is None and not self._is_trusted():
            return None
        self._rung = False
        visible = self._note_answer(self._silence or read())
        self._seen = visible.machine or visible.gpus
        mine = tuple(gpu.uuid for gpu in visible.gpus if suits(gpu))
        said = replace(me.record, only=mine, sees=tuple(gpu.uuid for gpu in self._seen))
        waiters, holdings = census(entries, without=said.id)
        names = {entry.id: entry.name for entry in entries}
        waiters = [*self._awake(waiters, names), as_waiter(said)]
        decided = plan(waiters, holdings, self._seen, boottime())
        whom = {id_: names[id_] for id_ in decided.groups if id_ != said.id}
        self._note_called(whom)
        called = [_bell_of(name) for name in whom.values()]
        granted = decided.groups.get(said.id)
        if granted is not None:
            me.update(said.on([gpu.uuid for gpu in granted]))
            return Turn(granted), called
        me.update(said)
        turn = self._turn(said, waiters, holdings, decided, len(ahead))
        if not visible.answered:
            turn = replace(turn, obstacles=visible.problem or "", strangers_only=False)
        return turn, called

    def _is_trusted(self) -> bool:
        """Whether the driver answered so lately that it may be asked while others wait."""
        return time.monotonic() < self._answered_at + _TRUST_SECONDS

    def _note_answer(self, visible: Visible) -> Visible:
        self._silence = None if visible.answered else visible
        if visible.answered:
            self._answered_at = time.monotonic()
        return visible

    def _be_in_line(self, entries: Sequence[Entry]) -> Reservation:
        if self.reservation is None:
            self.reservation = self.ledger.enter(self._template, entries)
        elif self.reservation.record.state is not JobState.WAITING or not any(
            entry.id == self.reservation.record.id for entry in entries
        ):
            self.reservation.update(self.reservation.record.on(()))
        return self.reservation

    def _follow(self, ahead: Sequence[Entry], me: Reservation) -> bool:
        """Watch what can make it my turn; True if the jobs have to be read once more.

        Whoever is ahead and sees all that I see looks for me as well, or follows one who does.
        """
        sees = set(me.record.sees)
        leaders = [
            e.name
            for e in ahead
            if e.record and sees and sees <= set(e.record.sees) and not self._is_silent(e.name)
        ]
        leader = leaders[-1] if leaders else ""
        if leader == self._leader:
            return False
        for watched in self._watched:
            self._watch.drop(watched)
        self._watched = {}
        bell = _bell_of(me.name)
        self.ledger.hang_up(bell)
        self._bell_seen = self.ledger.time_of(bell)
        self._add(leader, MODIFIED | CLOSED_AFTER_WRITE)
        self._add(bell, ATTRIBUTES)
        self._leader, self._polls = leader, not leader
        # one who died before the watch was set gives no event any more
        return True

    def _is_silent(self, name: str) -> bool:
        """Whether a waiter has not looked for too long; taking a slow one for that is harmless."""
        now, time_of_file = time.monotonic(), self.ledger.time_of(name)
        before, seen = self._signs.setdefault(name, (time_of_file, now))
        if before != time_of_file:
            self._signs[name] = (time_of_file, now)
            return False
        return now - seen > self._patience_seconds

    def _awake(self, waiters: Iterable[Waiter], names: Mapping[str, str]) -> list[Waiter]:
        """The waiters without those who did not come when I called them."""
        now = time.monotonic()
        # who came gave a sign, also where others had been faster
        self._called = {
            id_: (at, sign)
            for id_, (at, sign) in self._called.items()
            if id_ in names and self.ledger.time_of(names[id_]) == sign
        }
        asleep = {id_ for id_, (at, _) in self._called.items() if now - at >= _CALL_SECONDS}
        return [waiter for waiter in waiters if waiter.id not in asleep]

    def _note_called(self, whom: Mapping[str, str]) -> None:
        now = time.monotonic()
        for id_, name in whom.items():
            if id_ not in self._called:
                self._called[id_] = (now, self.ledger.time_of(name))

    def _add(self, name: str, events: int) -> None:
        watched = self._watch.add(name, events)
        if watched is not None:
            self._watched[watched] = name
        elif self._watch.fd is not None:
            self._watch.close()  # look often instead

    def _has_changed(self) -> bool:
        """Without events: whether jobs came, went or moved, or my bell was rung."""
        if self._polls:
            before, self._known = self._known, self._without_me(self.ledger.entries())
            if before != self._known:
                self._begin_to_settle()
            return before != self._known
        if self.reservation is not None:
            rung = self.ledger.time_of(_bell_of(self.reservation.name))
            if rung != self._bell_seen:
                self._bell_seen, self._rung = rung, True
                return True
        return not self._leader or not self.ledger.waits(self._leader)

    def _turn(
        self,
        me: JobRecord,
        waiters: Iterable[Waiter],
        holdings: Sequence[Holding],
        decided: Plan,
        ahead: int,
    ) -> Turn:
        mine = set(me.only)
        alone = ahead == 0 and not any(h.gpu is None or h.gpu in mine for h in holdings)
        frees = (gpu.index for gpu in self._seen if gpu.uuid in decided.awaited)
        return Turn(
            position=ahead + 1,
            obstacles=why_not(as_waiter(me), holdings, self._seen, decided),
            frees_next=tuple(dict.fromkeys(frees)),  # slices of a GPU have its number
            strangers_only=alone,
        )

    def _turn_unseen(self, entries: Sequence[Entry], me: Reservation, ahead: int) -> Turn:
        """How it stands by the records alone, with the GPUs as they were at the last look."""
        waiters, holdings = census(entries)
        decided = plan(
            waiters, holdings, [replace(gpu, free_bytes=0) for gpu in self._seen], boottime()
        )
        return self._turn(me.record, waiters, holdings, decided, ahead)

    def _begin_to_settle(self) -> None:
        self._settle_until = time.monotonic() + _SETTLE_SECONDS
        self._pause = _FIRST_PAUSE_SECONDS

    def _again(self) -> float | None:
        if self._silence is not None:
            return _SILENCE_SECONDS  # to see whether the driver answers again costs nothing
        if self._seen and self._leader is None:
            return 0.0  # from now on with a watch
        if time.monotonic() >= self._settle_until:
            now = time.monotonic()
            calls = [at + _CALL_SECONDS - now for at, _ in self._called.values()]
            return min((left for left in calls if left > 0), default=None)
        pause, self._pause = self._pause, min(self._pause * 2, _LONGEST_PAUSE_SECONDS)
        return pause

    def _without_me(self, entries: Iterable[Entry]) -> list[Entry]:
        return [entry for entry in entries if not self._is_mine(entry.name)]

    def _is_mine(self, name: str) -> bool:
        return self.reservation is not None and name == self.reservation.name


def _waits(entry: Entry) -> bool:
    return entry.record is not None and entry.record.state is JobState.WAITING


def _bell_of(name: str) -> str:
    return BELL_PREFIX + name.removeprefix(PREFIX)
