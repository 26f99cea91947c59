"""Many launchers at once on a simulated machine, a third of them killed at random moments.

Run on the machine that the environment describes: ``python chaos.py JSON``. Each member stands in
the host's line with the launcher's own code, then forks a trainer that takes what was claimed, in
two steps, from a device that refuses to be over-committed. Launchers and trainers are killed with
SIGKILL. Everything that happens goes into a log, one JSON object a line, and :func:`check` judges
that log without using anything of the code under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulated_nvml.device import OutOfMemory, SharedDevice

MIB = 1024**2


@dataclass(frozen=True)
class Chaos:
    """What is let loose.

    Attributes:
        log: where everything is told.
        launchers: how many.
        killed_share: of them, killed at a random moment.
        per_device: jobs that may share a GPU.
        sizes_mib: what they may need.
        longest_seconds: a trainer's run time is up to this.
        arrive_within_seconds: they start within this time.
        seed: of all that is random.
    """

    log: str
    launchers: int
    killed_share: float = 0.33
    per_device: int = 1
    sizes_mib: tuple[int, ...] = (4000, 8000, 16000, 30000)
    longest_seconds: float = 0.5
    arrive_within_seconds: float = 0.0
    seed: int = 1


def main() -> None:
    told = json.loads(sys.argv[1])
    chaos = Chaos(**{**told, "sizes_mib": tuple(told["sizes_mib"])})
    # imported once, before the forks
    import pynvml  # noqa: F401

    from robust_train import execution  # noqa: F401
    from robust_train.gpu import host_queue, inventory, visible  # noqa: F401

    device = SharedDevice(Path(os.environ["SIMULATED_NVML_STATE"]))
    rng = random.Random(chaos.seed)
    done = threading.Event()
    log = os.open(chaos.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    plans = [
        {
            "need": rng.choice(chaos.sizes_mib),
            "seconds": rng.uniform(0.02, chaos.longest_seconds),
            "delay": rng.uniform(0, chaos.arrive_within_seconds),
            "victim": rng.choice(("launcher", "launcher", "trainer", "both")),
            "kill_after": rng.uniform(0.0, 3 * chaos.longest_seconds)
            if rng.random() < chaos.killed_share
            else None,
        }
        for _ in range(chaos.launchers)
    ]
    pids = {}
    for number, member in enumerate(plans):
        pid = os.fork()
        if pid == 0:
            try:
                _member(number, member, chaos, device, log)
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

    threads = [threading.Thread(target=collect)]
    threads += [
        threading.Thread(target=kill, args=(n,))
        for n, member in enumerate(plans)
        if member["kill_after"] is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:  # before anybody is reaped: a process id must not be used again
        thread.join()
    for pid in pids.values():
        os.waitpid(pid, 0)
    deadline = time.monotonic() + 30
    while device.used() and time.monotonic() < deadline:  # orphaned trainers
        time.sleep(0.02)
    done.set()
    threads[0].join()
    _tell(log, "over", -1, left_on_device=device.used(), gpus=device.gpus())


def _member(
    number: int, plan: dict[str, Any], chaos: Chaos, device: SharedDevice, log: int
) -> None:
    from robust_train.execution import sleep_until_readable
    from robust_train.gpu.host_queue import HostQueue
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.queue_dir import directory_for
    from robust_train.gpu.visible import visible_gpus
    from robust_train.gpu.wait import GpuRequest, NoGpu

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    time.sleep(plan["delay"])
    queue = HostQueue(
        directory_for(None, os.environ),
        name=f"member{number}",
        run_dir="/",
        jobs_per_device=chaos.per_device,
        read=lambda processes: visible_gpus(read_inventory(processes=processes), os.environ),
    )
    _tell(log, "arrives", number, need=plan["need"], per_device=chaos.per_device)
    request = GpuRequest(plan["need"] * MIB, timeout_seconds=300, interval_seconds=5.0)

    found = queue.wait(request, lambda status: None, sleep_until_readable)
    if isinstance(found, NoGpu):
        _tell(log, "refused", number, reason=found.reason)
        return
    assert queue._tenancy is not None
    record = queue._tenancy.reservation.record
    said = {"need": plan["need"], "ticket": record.ticket, "decided": record.since}
    _tell(log, "granted", number, gpu=found.uuid, **said)
    trainer = os.fork()
    if trainer == 0:
        _trainer(number, plan, found.uuid, device, log)
    os.waitpid(trainer, 0)
    _tell(log, "ends", number, gpu=found.uuid)
    queue.release()


def _trainer(number: int, plan: dict[str, Any], uuid: str, device: SharedDevice, log: int) -> None:
    """Takes the half at once and the rest later; the reservation's descriptor is inherited."""
    first = plan["need"] // 2
    for mib in (first, plan["need"] - first):
        try:
            device.allocate(uuid, mib)
            _tell(log, "allocated", number, gpu=uuid, mib=mib, pid=os.getpid())
        except OutOfMemory as error:
            _tell(log, "overcommit", number, gpu=uuid, text=str(error))
            os._exit(1)
        time.sleep(plan["seconds"] / 2)
    _tell(log, "trained", number, gpu=uuid)
    device.release()
    os._exit(0)


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _tell(log: int, event: str, number: int, **fields: Any) -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    line = {"t": now, "event": event, "member": number, **fields}
    os.write(log, (json.dumps(line) + "\n").encode())


@dataclass(frozen=True)
class Verdict:
    """What the checker found; everything but ``served``, ``passed`` and ``killed`` must be 0."""

    over_commits: int
    leaked_bytes: int
    unserved_survivors: int
    errors: int
    unlawful_passes: int
    crowded: int
    served: int
    passed: int
    killed: int

    @property
    def faults(self) -> int:
        """All that must not be."""
        wrong = self.over_commits + self.leaked_bytes + self.errors + self.unlawful_passes
        return wrong + self.unserved_survivors + self.crowded


def check(lines: Iterable[str]) -> Verdict:
    """Judge a log.

    The order of two grants is that of the moments in the ledger lock, which the members pass on:
    when each of them comes to write into the log is up to the kernel. A pass is unlawful if the one
    who was passed needs no more memory, so that he could have had the very GPU, and no other GPU
    was left for him: each had a job, or memory of one on the way back.
    """
    events = sorted((json.loads(line) for line in lines), key=lambda event: event["t"])
    of = {kind: [e for e in events if e["event"] == kind] for kind in {e["event"] for e in events}}
    killed = {e["member"] for e in of.get("killed", ())}
    granted = {e["member"]: e for e in of.get("granted", ())}
    survivors = {e["member"] for e in of["arrives"]} - killed
    per_device = of["arrives"][0]["per_device"]
    unlawful = passes = 0
    for later in granted.values():
        for earlier in granted.values():
            if earlier["ticket"] < later["ticket"] and earlier["decided"] > later["decided"]:
                passes += 1
                if per_device == 1 and earlier["need"] <= later["need"]:
                    unlawful += not _left_over(later, granted.values(), events)
    crowded = 0
    for grant in granted.values():
        mine = [e for e in of.get("allocated", ()) if e["member"] == grant["member"]]
        for other in granted.values():
            if other["member"] == grant["member"] or other["gpu"] != grant["gpu"]:
                continue
            ended = _end_of(other["member"], events)
            if per_device == 1 and mine and other["t"] < mine[0]["t"] < ended:
                crowded += 1
    return Verdict(
        over_commits=len(of.get("overcommit", ())),
        leaked_bytes=sum(of["over"][0]["left_on_device"].values()),
        unserved_survivors=len(survivors - set(granted)),
        errors=len(of.get("error", ())) + len(of.get("refused", ())),
        unlawful_passes=unlawful,
        crowded=crowded,
        served=len(granted),
        passed=passes,
        killed=len(killed),
    )


def _left_over(
    later: dict[str, Any], granted: Iterable[dict[str, Any]], events: list[dict[str, Any]]
) -> set[str]:
    """GPUs without a job when ``later`` was given its own."""
    in_use = {
        other["gpu"]
        for other in granted
        if other["decided"] <= later["decided"] < _end_of(other["member"], events)
    }
    return set(events[-1]["gpus"]) - in_use


def _end_of(member: int, events: list[dict[str, Any]]) -> float:
    """Until when a member's trainer surely held its GPU."""
    trained = [e["t"] for e in events if e["event"] == "trained" and e["member"] == member]
    allocated = [e["t"] for e in events if e["event"] == "allocated" and e["member"] == member]
    return max(trained, default=max(allocated, default=0.0))


def as_argument(chaos: Chaos) -> str:
    """For the command line."""
    return json.dumps(asdict(chaos))


if __name__ == "__main__":
    main()
