"""Registry, plan and the announcing of GPUs, as a state machine: any order of steps and kills.

Records and locks are real, in a directory of their own; the clock, the GPUs and the processes are
simulated: an attempt is a duplicate of the launcher's descriptor, which is what it inherits, and a
SIGKILL closes descriptors and cleans up nothing. One job's poll may run in the middle of another's,
between its announcement and its second look.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from robust_train.gpu.visible import Visible
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue import host_queue, queue_dir, registry, waiting
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.registry import QueuedJob, Registry
from robust_train.queue.waiting import Waiting
from robust_train.readable import MIB

TOTAL = 40000 * MIB
UUIDS = ("GPU-a", "GPU-b", "GPU-c")
# need in MiB, GPUs, jobs per GPU
wanted = st.tuples(
    st.sampled_from((4000, 14000, 26000, 40000)), st.sampled_from((1, 1, 2, 3)), st.integers(1, 3)
)
_READ_LOCK = struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)


@dataclass
class Member:
    """One launcher and its attempt."""

    number: int
    queue: HostQueue
    request: GpuRequest
    per_device: int
    polls: Waiting | None  # None once it has GPUs
    gpus: tuple[str, ...] = ()
    attempt: int | None = None  # its descriptor of the reservation
    has_launcher: bool = True
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def lives(self):
        return self.has_launcher or self.attempt is not None


def where(**wanted):
    """A rule for a machine that has such members."""
    return precondition(lambda machine: bool(machine.those(**wanted)))


class QueueMachine(RuleBasedStateMachine):
    """What launchers, attempts and strangers may do, and what must hold after each step."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1000.0
        self.members = []
        self.numbers = itertools.count()
        self.lost = dict.fromkeys(UUIDS, 0)  # memory of the dead
        self.interrupted_by = []
        self.strangers = []
        self.patches = contextlib.ExitStack()
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (registry, host_queue, queue_dir, waiting):
            self.patches.enter_context(mock.patch.object(module, "time", clock))
        self.observer = Registry(self.folder / "queue")

    def read(self, processes):
        """Read the GPUs; before that, whatever another process does in the meantime happens."""
        if self.interrupted_by:
            self.poll_once(self.interrupted_by.pop())
        gpus = []
        for index, uuid in enumerate(UUIDS):
            used = self.used(uuid)
            gpus.append(GpuInfo(uuid, "A100", index, uuid, TOTAL, TOTAL - used, used))
        return Visible(tuple(gpus), inventory=Inventory(tuple(gpus)))

    def used(self, uuid):
        return self.lost[uuid] + sum(member.memory.get(uuid, 0) for member in self.members)

    def poll_once(self, member):
        if member.polls is None:
            return
        granted = member.polls.poll()
        if granted:
            member.polls = None
            member.gpus = tuple(gpu.uuid for gpu in granted)
            member.attempt = os.dup(*member.queue.hold)

    def those(self, **wanted):
        """Return the members whose attributes are true or false as wanted."""
        items = wanted.items()
        return [m for m in self.members if all(bool(getattr(m, k)) == v for k, v in items)]

    @initialize(jobs=st.lists(wanted, min_size=2, max_size=4))
    def several_arrive(self, jobs):
        for job in jobs:
            self.arrive(job)

    @rule(job=wanted)
    @precondition(lambda self: len(self.members) < 6)
    def arrive(self, job):
        need, count, per_device = job
        number = next(self.numbers)
        job = QueuedJob(name=f"job{number}", jobs_per_device=per_device)
        queue = HostQueue(self.folder / "queue", self.read, job)
        request = GpuRequest(need * MIB, interval_seconds=30.0, count=count)
        queue.join(request)
        polls = Waiting(request, queue)
        self.members.append(Member(number, queue, request, per_device, polls))

    @rule(data=st.data())
    @where(polls=True)
    def poll(self, data):
        """One polls, and up to two others poll in the middle of that."""
        waiting = st.sampled_from(self.those(polls=True))
        drawn = st.lists(waiting, min_size=1, max_size=3, unique_by=id)
        self.interrupted_by = data.draw(drawn)
        self.poll_once(self.interrupted_by.pop())
        self.interrupted_by = []

    @rule()
    def all_poll(self):
        for member in list(self.members):
            self.poll_once(member)

    @rule(data=st.data(), reports=st.booleans())
    @where(attempt=True)
    def allocate(self, data, reports):
        """Take all that was reserved: it has to be there."""
        member = data.draw(st.sampled_from(self.those(attempt=True)))
        for rank, uuid in enumerate(member.gpus):
            more = member.request.min_bytes - member.memory.get(uuid, 0)
            assert self.used(uuid) + more <= TOTAL, "over-committed"
            member.memory[uuid] = member.request.min_bytes
            if reports and member.has_launcher:
                member.queue.report(member.request.min_bytes, rank)

    def end_attempt(self, member):
        for uuid, size in member.memory.items():
            self.lost[uuid] += size
        member.memory = {}
        if member.attempt is not None:
            os.close(member.attempt)
        member.attempt = None

    @rule(data=st.data(), moves=st.booleans())
    @where(attempt=True, has_launcher=True)
    def attempt_ends(self, data, moves):
        """The attempt fails: the launcher continues elsewhere, or ends."""
        member = data.draw(st.sampled_from(self.those(attempt=True, has_launcher=True)))
        self.end_attempt(member)
        member.queue.drain()
        here = [gpu.uuid for gpu in member.queue.find_open_gpus()]
        if moves and len(here) >= len(member.gpus):
            wanted = tuple(data.draw(st.permutations(here))[: len(member.gpus)])
            if member.queue.take(wanted, member.request.min_bytes):
                member.gpus = wanted
                (job,) = (j for j in self.observer.jobs() if j.id == member.queue.job_id)
                # on the same GPUs it reserves no more than there is
                member.request = GpuRequest(job.reserved_bytes, count=member.request.count)
                member.attempt = os.dup(*member.queue.hold)
                return
        member.queue.release()
        self.members.remove(member)

    @rule(data=st.data())
    @where(has_launcher=True)
    def kill_launcher(self, data):
        member = data.draw(st.sampled_from(self.those(has_launcher=True)))
        member.has_launcher = False
        member.polls = None
        for descriptor in member.queue.hold:
            os.close(descriptor)
        if not member.lives:
            self.members.remove(member)

    @rule(data=st.data())
    @where(attempt=True)
    def kill_attempt(self, data):
        member = data.draw(st.sampled_from(self.those(attempt=True)))
        self.end_attempt(member)
        if not member.lives:
            self.members.remove(member)

    @rule(seconds=st.sampled_from((0.5, 3.0, 40.0)), comes_back=st.booleans())
    def time_passes(self, seconds, comes_back):
        self.now += seconds
        if comes_back:
            self.lost = dict.fromkeys(UUIDS, 0)

    @rule(content=st.binary(max_size=50), operation=st.sampled_from((fcntl.LOCK_SH, fcntl.LOCK_EX)))
    def a_stranger_plants_a_file_and_locks_all_that_can_be_read(self, content, operation):
        folder = self.observer.path
        (folder / f"record.{len(self.strangers):010}.abcdef").write_bytes(content)
        for path in folder.glob("record.*"):
            fd = os.open(path, os.O_RDONLY)
            self.strangers.append(fd)
            with contextlib.suppress(OSError):
                fcntl.flock(fd, operation | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _READ_LOCK)

    @invariant()
    def nothing_is_over_committed(self):
        for uuid in UUIDS:
            here = [member for member in self.members if uuid in member.gpus]
            assert sum(member.request.min_bytes for member in here) <= TOTAL
            assert len(here) <= min((member.per_device for member in here), default=0)
        for member in self.members:
            assert len(set(member.gpus)) == len(member.gpus) in (0, member.request.count)

    @invariant()
    def the_registry_shows_who_lives_and_what_they_hold(self):
        # one that has not polled yet has no record
        lives = {member.queue.job_id: member for member in self.members if member.queue.job_id}
        listed = {job.id: job for job in self.observer.jobs()}
        assert listed.keys() == lives.keys()
        for job_id, member in lives.items():
            assert listed[job_id].gpus == member.gpus
            assert listed[job_id].count == member.request.count

    def teardown(self):
        """Whoever waits gets its turn as long as running jobs end; then nothing is left."""
        seconds_left = 200  # each looks at the GPUs every 30 s, whatever the records show
        while self.members and seconds_left:
            seconds_left -= 1
            self.now += 1
            self.lost = dict.fromkeys(UUIDS, 0)
            may_end = [member for member in self.members if member.attempt or not member.polls]
            for member in may_end[:1]:
                self.end_attempt(member)
                if member.has_launcher:
                    member.queue.release()
                self.members.remove(member)
            for member in self.members:
                self.poll_once(member)
        assert not self.members, "a job was never served"
        assert self.observer.jobs() == []
        assert [*self.observer.path.iterdir()] == []
        self.observer.close()
        for fd in self.strangers:
            os.close(fd)
        self.patches.close()
        shutil.rmtree(self.folder)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink takes minutes
    print_blob=True,
)
