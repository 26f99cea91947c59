"""Many launchers at once on a simulated machine, a third of them killed at random moments.

Run on the machine that the environment describes: ``python chaos.py JSON``. Each member stands in
the host's queue with the launcher's own code, then forks a trainer that takes what was claimed, in
two steps, from a device that refuses to be over-committed. Launchers and trainers are killed with
SIGKILL. What is seen of it from outside goes into a log that :mod:`witness` judges.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import signal
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulated_nvml.device import OutOfMemory, SharedDevice

MIB = 1024**2
_TOLD = struct.Struct("<qq")  # rank, MiB
_CREATED, _CLOSED_AFTER_WRITE = 0x100, 0x8  # inotify's IN_CREATE, IN_CLOSE_WRITE
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Chaos:
    """What is let loose.

    Attributes:
        log: where everything is told.
        launchers: how many.
        killed_share: of them, killed at a random moment.
        per_device: jobs that may share a GPU.
        sizes_mib: what they may need on each GPU.
        counts: how many GPUs they may need at once.
        longest_seconds: a trainer's run time is up to this.
        arrive_within_seconds: they start within this time.
        seed: of all that is random.
    """

    log: str
    launchers: int
    killed_share: float = 0.33
    per_device: int = 1
    sizes_mib: tuple[int, ...] = (4000, 8000, 16000, 30000)
    counts: tuple[int, ...] = (1,)
    longest_seconds: float = 0.5
    arrive_within_seconds: float = 0.0
    seed: int = 1


def main() -> None:
    told = json.loads(sys.argv[1])
    chaos = Chaos(**told)
    # imported once, before the forks
    import pynvml  # noqa: F401

    from robust_train import execution  # noqa: F401

    rng = random.Random(chaos.seed)
    done = threading.Event()
    log = os.open(chaos.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    device = _device(log, -1)
    queue = _queue_folder()
    seen = _watch(queue)
    plans = [
        {
            "need": rng.choice(chaos.sizes_mib),
            "seconds": rng.uniform(0.02, chaos.longest_seconds),
            "delay": rng.uniform(0, chaos.arrive_within_seconds),
            "victim": rng.choice(("launcher", "launcher", "trainer", "both")),
            "kill_after": rng.uniform(0.0, 3 * chaos.longest_seconds)
            if rng.random() < chaos.killed_share
            else None,
            "count": rng.choice(chaos.counts) if len(chaos.counts) > 1 else chaos.counts[0],
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
                _tell(log, "error", number, text=repr(error))
                os._exit(1)
            os._exit(0)
        pids[number] = pid

    def collect() -> None:
        while not done.is_set():
            device.collect()
            time.sleep(0.01)

    def kill(number: int) -> None:
        time.sleep(plans[number]["delay"] + plans[number]["kill_after"])
        trainers = _children(pids[number])
        victim = plans[number]["victim"]
        if victim != "trainer":
            _tell(log, "killed", number, what="launcher")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[number], signal.SIGKILL)
        if victim != "launcher":
            for trainer in trainers:
                _tell(log, "killed", number, what="trainer")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trainer, signal.SIGKILL)

    watching = [
        threading.Thread(target=collect),
        threading.Thread(target=_note_files, args=(seen, queue, pids, log, done)),
    ]
    killing = [
        threading.Thread(target=kill, args=(n,))
        for n, member in enumerate(plans)
        if member["kill_after"] is not None
    ]
    for thread in watching + killing:
        thread.start()
    for thread in killing:  # before anybody is reaped: a process id must not be used again
        thread.join()
    with contextlib.suppress(ChildProcessError):  # orphaned trainers too: who lives has its lock
        while True:
            os.waitpid(-1, 0)
    deadline = time.monotonic() + 30
    while device.used() and time.monotonic() < deadline:  # the dead's memory
        time.sleep(0.02)
    locked = sum(_is_locked(path) for path in queue.glob("job.*"))
    done.set()
    for thread in watching:
        thread.join()
    left = {"left_on_device": device.used(), "left_locked": locked}
    _tell(log, "over", -1, totals=device.totals(), **left)


def _member(number: int, plan: dict[str, Any], chaos: Chaos, log: int) -> None:
    from robust_train.execution import sleep_until_readable
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.visible import Visible, visible_gpus
    from robust_train.queue.host_queue import HostQueue
    from robust_train.queue.queue_dir import directory_for
    from robust_train.queue.waiting import GpuRequest, NoGpu

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked = looked = 0.0

    def look(processes: bool) -> Visible:
        nonlocal asked, looked
        asked = time.monotonic()
        visible = visible_gpus(read_inventory(processes=processes), os.environ)
        looked = time.monotonic()
        return visible

    time.sleep(plan["delay"])
    queue = HostQueue(
        directory_for(None, os.environ),
        name=f"member{number}",
        run_dir="/",
        jobs_per_device=chaos.per_device,
        read=look,
    )
    need, count = plan["need"], plan["count"]
    _tell(log, "arrives", number, need=need, count=count, per_device=chaos.per_device)
    request = GpuRequest(need * MIB, timeout_seconds=300, interval_seconds=5.0, count=count)
    found = queue.wait(request, lambda status: None, sleep_until_readable)
    if isinstance(found, NoGpu):
        _tell(log, "error", number, text=found.reason)
        return
    times = {"asked": asked, "looked": looked}
    uuids = [gpu.uuid for gpu in found]
    _tell(log, "served", number, gpus=uuids, file=_my_file(), **times)
    taken, its_end = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        _trainer(plan, uuids, _device(log, number), its_end)
    os.close(its_end)
    while told := os.read(taken, _TOLD.size):
        rank, mib = _TOLD.unpack(told)
        queue.report(mib * MIB, rank)
    os.waitpid(trainer, 0)
    queue.release()


def _trainer(plan: dict[str, Any], uuids: list[str], device: SharedDevice, launcher: int) -> None:
    """Takes the half at once and the rest later; the reservation's descriptor is inherited."""
    first, taken = plan["need"] // 2, 0
    for mib in (first, plan["need"] - first):
        taken += mib
        for rank, uuid in enumerate(uuids):
            try:
                device.allocate(uuid, mib)
            except OutOfMemory:
                os._exit(1)
            with contextlib.suppress(BrokenPipeError):
                os.write(launcher, _TOLD.pack(rank, taken))
        time.sleep(plan["seconds"] / 2)
    device.release()
    os._exit(0)


def _device(log: int, owner: int) -> SharedDevice:
    def tell(event: str, owner: int, gpu: str, mib: int) -> None:
        _tell(log, event, owner, gpu=gpu, mib=mib)

    return SharedDevice(Path(os.environ["SIMULATED_NVML_STATE"]), owner=owner, tell=tell)


def _queue_folder() -> Path:
    """Made before anybody comes, so that nothing that happens there is missed."""
    from robust_train.queue.queue_dir import boot_name, directory_for
    from robust_train.queue.reservations import JobRegistry

    base = directory_for(None, os.environ)
    JobRegistry(base).close()
    return base / boot_name()


def _watch(folder: Path) -> int:
    """An inotify descriptor that tells of files that appear, and whose last writer closes."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    added = libc.inotify_add_watch(fd, os.fsencode(folder), _CREATED | _CLOSED_AFTER_WRITE)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    assert added >= 0, os.strerror(ctypes.get_errno())
    return fd


def _note_files(
    seen: int, folder: Path, pids: dict[int, int], log: int, done: threading.Event
) -> None:
    """Tell which jobs' files come and go, and whose they are."""
    unknown: dict[str, int] = {}
    while True:
        # an end that was called before the last events were read comes after them
        ends = done.is_set()
        select.select([seen], [], [], 0.0 if ends else 0.01)
        with contextlib.suppress(BlockingIOError):
            data, at = os.read(seen, 65536), 0
            while at < len(data):
                _, events, _, length = struct.unpack_from("iIII", data, at)
                name = os.fsdecode(data[at + 16 : at + 16 + length].rstrip(b"\0"))
                at += 16 + length
                if not name.startswith("job."):
                    continue
                if events & _CREATED:
                    _tell(log, "enters", -1, file=name)
                    with contextlib.suppress(FileNotFoundError):
                        unknown[name] = (folder / name).stat().st_ino
                else:
                    _tell(log, "leaves", -1, file=name)
                    unknown.pop(name, None)
        if unknown:
            holders = _lock_holders()
            members = {pid: number for number, pid in pids.items()}
            for name, inode in list(unknown.items()):
                if holders.get(inode) in members:
                    _tell(log, "owns", members[holders[inode]], file=name)
                    del unknown[name]
        if ends:
            return


def _lock_holders() -> dict[int, int]:
    """Process ids by inode, of all that hold a flock."""
    lines = Path("/proc/locks").read_text().splitlines()
    held = (line.split() for line in lines if " FLOCK " in line and "->" not in line)
    return {int(words[5].rpartition(":")[2]): int(words[4]) for words in held}


def _my_file() -> str:
    """The name of the job file that this process has open."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
            if name.startswith("job."):
                return name
    return ""


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _tell(log: int, event: str, number: int, **fields: Any) -> None:
    line = {"t": time.monotonic(), "event": event, "member": number, **fields}
    os.write(log, (json.dumps(line) + "\n").encode())


def as_argument(chaos: Chaos) -> str:
    """For the command line."""
    return json.dumps(asdict(chaos))


if __name__ == "__main__":
    main()
