"""Many launchers at once on a simulated machine, a third of them killed at random moments.

Run on the machine that the environment describes: ``python chaos.py JSON``. Each member queues with
the launcher's own code, then forks a trainer that inherits the reservation and takes its memory in
two steps from a device that refuses to be over-committed. Launchers and trainers are killed with
SIGKILL. :func:`judge` reads the log.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from simulated_nvml.device import OutOfMemory, SharedDevice

MIB = 1024**2
_REPORT = struct.Struct("<qq")  # rank, MiB
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Chaos:
    """What is let loose."""

    log: str
    launchers: int
    killed_share: float = 0.33  # of the launchers, killed at a random moment
    per_device: int = 1  # jobs that may share a GPU
    sizes_mib: tuple[int, ...] = (4000, 8000, 16000, 30000)  # needed on each GPU
    counts: tuple[int, ...] = (1,)  # GPUs that they need at once
    longest_seconds: float = 0.5  # a trainer's run time is up to this
    seed: int = 1


@dataclass(frozen=True)
class Verdict:
    """Everything but ``served`` and ``killed`` is a fault."""

    over_commits: int  # allocations that a device refused
    crowded: int  # GPUs with more jobs at once than they may have
    torn: int  # jobs that got another number of GPUs than they need
    unserved: int  # jobs that were not killed and never got GPUs
    errors: int  # members that failed
    leaked_mib: int  # left on devices at the end
    leaked_locks: int  # reservations that were alive at the end
    served: int
    killed: int

    @property
    def faults(self):
        values = asdict(self)
        return sum(value for key, value in values.items() if key not in ("served", "killed"))


def judge(lines):
    """Return what went wrong by the log; shares no code with the queue."""
    events = [json.loads(line) for line in lines]
    kinds = Counter(event["event"] for event in events)
    arrived = {event["member"]: event for event in events if event["event"] == "arrives"}
    served = {event["member"]: event for event in events if event["event"] == "served"}
    killed = {event["member"] for event in events if event["event"] == "killed"}
    crowded = set()
    on = {}
    dead = set()  # their memory comes back a little later
    for event in events:
        if event["event"] == "killed" and event["what"] == "trainer":
            dead.add(event["member"])
        elif event["event"] == "takes":
            here = on.setdefault(event["gpu"], Counter())
            here[event["member"]] += event["mib"]
            if (
                sum(mib > 0 for n, mib in here.items() if n not in dead)
                > arrived[event["member"]]["per_device"]
            ):
                crowded.add(event["gpu"])
        elif event["event"] in ("returns", "dies"):
            on[event["gpu"]][event["member"]] -= event["mib"]
    (over,) = (event for event in events if event["event"] == "over")
    return Verdict(
        over_commits=kinds["refuses"],
        crowded=len(crowded),
        torn=sum(
            len(set(served_job["gpus"])) != arrived[n]["count"] for n, served_job in served.items()
        ),
        unserved=len(arrived.keys() - served.keys() - killed),
        errors=kinds["error"],
        leaked_mib=sum(over["left_on_device"].values()),
        leaked_locks=over["left_locked"],
        served=len(served),
        killed=len(killed),
    )


def main():
    chaos = Chaos(**json.loads(sys.argv[1]))
    import pynvml  # noqa: F401  # once, before the forks

    from robust_train.queue.queue_dir import directory_for
    from robust_train.queue.registry import Registry

    rng = random.Random(chaos.seed)
    done = threading.Event()
    log = os.open(chaos.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    device = _device(log, -1)
    plans = [
        {
            "need": rng.choice(chaos.sizes_mib),
            "count": rng.choice(chaos.counts),
            "seconds": rng.uniform(0.02, chaos.longest_seconds),
            "victim": rng.choice(("launcher", "launcher", "trainer", "both")),
            "kill_after": rng.uniform(0.0, 4 * chaos.longest_seconds)
            if rng.random() < chaos.killed_share
            else None,
        }
        for _ in range(chaos.launchers)
    ]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pids = {}
    for number, member in enumerate(plans):
        pid = os.fork()
        if pid == 0:
            try:
                _member(number, member, chaos, log)
            except BaseException as error:
                _log(log, "error", number, text=repr(error))
                os._exit(1)
            os._exit(0)
        pids[number] = pid

    def collect():
        while not done.is_set():
            device.collect()
            time.sleep(0.01)

    def kill(number):
        time.sleep(plans[number]["kill_after"])
        trainers = _children(pids[number])
        victim = plans[number]["victim"]
        if victim != "trainer":
            _log(log, "killed", number, what="launcher")
            os.kill(pids[number], signal.SIGKILL)
        if victim != "launcher":
            for trainer in trainers:
                _log(log, "killed", number, what="trainer")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trainer, signal.SIGKILL)

    collecting = threading.Thread(target=collect)
    victims = [number for number, plan in enumerate(plans) if plan["kill_after"] is not None]
    killing = [threading.Thread(target=kill, args=(number,)) for number in victims]
    for thread in (collecting, *killing):
        thread.start()
    for thread in killing:  # before any is reaped: a process id must not be used again
        thread.join()
    with contextlib.suppress(ChildProcessError):  # orphaned trainers too
        while True:
            os.waitpid(-1, 0)
    deadline = time.monotonic() + 30
    while device.used() and time.monotonic() < deadline:  # memory of the dead
        time.sleep(0.02)
    done.set()
    collecting.join()
    registry = Registry(directory_for(None, os.environ))
    left = len(registry.jobs())
    registry.close()
    _log(log, "over", -1, left_on_device=device.used(), left_locked=left)


def _member(number, plan, chaos, log):
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.visible import visible_gpus
    from robust_train.queue.host_queue import GpuRequest, HostQueue
    from robust_train.queue.queue_dir import directory_for
    from robust_train.queue.registry import QueuedJob

    def read(processes):
        return visible_gpus(read_inventory(processes=processes), os.environ)

    job = QueuedJob(name=f"member{number}", jobs_per_device=chaos.per_device)
    queue = HostQueue(directory_for(None, os.environ), read, job)
    need, count = plan["need"], plan["count"]
    _log(log, "arrives", number, count=count, per_device=chaos.per_device)
    request = GpuRequest(need * MIB, timeout_seconds=300, interval_seconds=5.0, count=count)

    try:
        _train(number, plan, log, queue, request)
    finally:
        queue.release()


def _train(number, plan, log, queue, request):
    from robust_train.queue.waiting import NoGpu, wait_for_gpus

    answer = wait_for_gpus(queue, request)
    if isinstance(answer, NoGpu):
        _log(log, "error", number, text=answer.reason)
        return
    uuids = [gpu.uuid for gpu in answer]
    _log(log, "served", number, gpus=uuids)
    taken, its_end = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        _trainer(plan, uuids, _device(log, number), its_end)
    os.close(its_end)
    while report := os.read(taken, _REPORT.size):
        rank, mib = _REPORT.unpack(report)
        queue.report(mib * MIB, rank)
    os.waitpid(trainer, 0)


def _trainer(plan, uuids, device, launcher):
    """Take half of the memory at once and the rest later, as a child with the descriptor."""
    first, taken = plan["need"] // 2, 0
    for mib in (first, plan["need"] - first):
        taken += mib
        for rank, uuid in enumerate(uuids):
            try:
                device.allocate(uuid, mib)
            except OutOfMemory:
                os._exit(1)
            with contextlib.suppress(BrokenPipeError):
                os.write(launcher, _REPORT.pack(rank, taken))
        time.sleep(plan["seconds"] / 2)
    device.release()
    os._exit(0)


def _device(log, owner):
    def tell(event, owner, gpu, mib):
        _log(log, event, owner, gpu=gpu, mib=mib)

    return SharedDevice(Path(os.environ["SIMULATED_NVML_STATE"]), owner=owner, tell=tell)


def _children(pid):
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _log(log, event, number, **fields):
    line = {"event": event, "member": number, **fields}
    os.write(log, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    main()
