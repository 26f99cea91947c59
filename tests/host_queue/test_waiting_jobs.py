"""The jobs of a host as each other's neighbours: their queue, GPUs that they leave idle, drivers
that hang. Records and locks are real, the clock is this process's and can be moved ahead.

Every interval is 600 s: whoever continues earlier than that was woken by a record.
"""

import contextlib
import itertools
import json
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import warm
from robust_train.cli import machine
from robust_train.cli.main import main
from robust_train.gpu.bounded import NoAnswerError, ask
from robust_train.gpu.visible import Visible
from robust_train.model.gpu import GpuInfo, Inventory
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.registry import IDLE_SECONDS, UNSEEN_SECONDS, QueuedJob, Registry
from robust_train.queue.waiting import Waiting, wait_for_gpus
from robust_train.readable import MIB
from simulated_nvml import Gpu
from world import wait_until

HANGS = Visible(inventory=Inventory(problem="the driver has not answered", answered=False))
MEMORY = "nvmlDeviceGetMemoryInfo_v2"


class Host:
    """A queue directory, and GPUs of 40000 MiB that are idle."""

    def __init__(self, base):
        self.base = base
        self.gpus = []
        self.jobs = []

    def with_gpus(self, count):
        size = 40000 * MIB
        uuids = [(f"GPU-{n}", "A100", n, str(n)) for n in range(count)]
        self.gpus = [GpuInfo(*names, size, size, 0, utilization_percent=0) for names in uuids]
        return self

    def change(self, **figures):
        """Change the first GPU."""
        self.gpus[0] = replace(self.gpus[0], **figures)

    def job(self, **request):
        self.jobs.append(Job(self, **request))
        return self.jobs[-1]

    def shown(self, capsys):
        """``robust-train queue --json``."""
        assert main(["queue", "--json", "--dir", str(self.base)]) == 0
        return json.loads(capsys.readouterr().out)["jobs"]


class Job:
    """A launcher's part in it."""

    def __init__(self, host, **request):
        self.host = host
        self.driver_hangs = False
        self.said = []
        self.request = GpuRequest(4000 * MIB, **{"interval_seconds": 600, **request})
        self.queue = HostQueue(host.base, self.read, QueuedJob(name="test"))

    def read(self, processes):
        gpus = tuple(self.host.gpus)
        return HANGS if self.driver_hangs else Visible(gpus, inventory=Inventory(gpus))

    def poll(self):
        """Look once; return the numbers of the GPUs that it gets."""
        self.queue.join(self.request)
        return [gpu.index for gpu in Waiting(self.request, self.queue).poll()]

    def wait(self, *events):
        """Wait while one thing after the other happens; return the numbers of its GPUs."""
        happens, self.pauses = iter(events), []

        def sleep(seconds):
            self.pauses.append(seconds)
            event = next(happens)
            event()

        return [g.index for g in wait_for_gpus(self.queue, self.request, self.said.append, sleep)]

    def end(self):
        self.queue.release()


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path / "queue")
    yield host
    for job in host.jobs:
        job.end()


@pytest.fixture
def later(monkeypatch):
    """Moves this process's clock ahead by some seconds."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(ahead))
    return ahead.append


def test_jobs_that_want_every_gpu_take_turns(host, capsys):
    first, second = (host.with_gpus(3).job(count=3) for _ in range(2))
    small = host.job()

    def a_third_comes():
        assert small.poll() == []
        assert main(["queue", "--dir", str(host.base)]) == 0
        rows = capsys.readouterr().out.splitlines()[1:4]
        cells = [re.split(r"  +", row.strip()) for row in rows]
        assert [row[1:4] + [row[5], row[7]] for row in cells] == [
            ["-", "running", "test", "3 × 4000", "GPU-0, GPU-1, GPU-2"],
            ["1", "waiting", "test", "3 × 4000", "-"],
            ["2", "waiting", "test", "4000", "-"],
        ]

    assert sorted(first.wait()) == [0, 1, 2]
    assert sorted(second.wait(a_third_comes, first.end)) == [0, 1, 2]
    taken = "left: 0 of 3 GPUs available; GPUs 0, 1, 2: taken, one job per GPU ("
    assert taken in second.said[0].sentence()
    assert small.wait(second.end) == [0]
    assert small.said[0].position == 1, "it has moved up"


def test_a_slow_driver_lets_no_one_pass(host, later, capsys, monkeypatch):
    """If nothing keeps the driver awake it takes seconds for each GPU."""
    first, running, behind = (host.job() for _ in range(3))
    assert first.poll() == []
    host.with_gpus(1)
    later(UNSEEN_SECONDS + 1)
    assert running.wait() == [0], "it passes"
    assert first.poll() == []

    def read_slowly(processes):
        later(UNSEEN_SECONDS + 1)
        return Job.read(behind, processes)

    running.queue.read_machine = read_slowly
    behind.queue.read_machine = read_slowly
    assert running.queue.find_open_gpus() == (), "first was there before"
    assert first.poll() == []
    running.end()
    assert behind.poll() == []
    monkeypatch.setattr(
        machine, "read_inventory", lambda processes: read_slowly(processes).inventory
    )
    first.queue.requeue(first.request, ("GPU-0",))
    assert "a GPU is free for it" in str(host.shown(capsys)[0]["reason"])


def test_slow_reading_still_polls_often_enough(host, later):
    """Otherwise the job would be passed."""
    running, slow = (host.with_gpus(1).job() for _ in range(2))
    running.wait()
    others = slow.queue.others

    def read_others_slowly():
        later(1.0)
        return others()

    slow.queue.others = read_others_slowly
    assert slow.wait(running.end) == [0]
    assert max(slow.pauses) < UNSEEN_SECONDS / 2


def test_a_job_returns_to_its_queue_position(host):
    early, late = (host.with_gpus(1).job() for _ in range(2))
    assert early.wait() == [0]
    assert late.poll() == []
    host.change(free_bytes=100 * MIB)  # a stranger was faster

    def is_free():
        host.change(free_bytes=40000 * MIB)
        assert late.poll() == [], "it stands behind"

    early.request, job_id = replace(early.request, interval_seconds=0.0), early.queue.job_id
    assert early.wait(is_free) == [0]
    assert early.queue.job_id == job_id


def let_pass(early, late, *, at_read):
    """Let ``early`` take its GPU while ``late`` reads the machine for the ``at_read``-th time."""
    numbers = itertools.count(1)

    def read(processes):
        if next(numbers) == at_read:
            early.wait()
        return late.read(processes)

    late.queue.read_machine = read


def test_the_loser_of_a_race_takes_leftovers(host):
    """It does not wait. Two were started at the same moment: each decides before it sees the
    other.
    """
    late, early = (host.with_gpus(2).job(timeout_seconds=0.0) for _ in range(2))
    let_pass(early, late, at_read=2)
    assert late.wait(lambda: None) == [1]


def test_losing_a_race_costs_no_waiting_time(host, later, capsys):
    """The job waits as long as before."""
    late, early = host.job(), host.job()
    assert late.poll() == []
    later(100)
    host.with_gpus(1)
    let_pass(early, late, at_read=1)
    assert late.poll() == []
    waiting = [job for job in host.shown(capsys) if job["state"] == "waiting"]
    assert waiting[0]["seconds_in_state"] >= 100


def test_an_idle_gpu_is_marked_until_it_computes(host, later, capsys):
    """Its job leaves it idle for an hour."""

    def idle_seconds():
        job.queue.tick()
        (row,) = host.shown(capsys)
        return row["gpus"][0]["idle_seconds"]

    job = host.with_gpus(1).job()
    job.wait()
    for busy in (3, None):  # None: it does not report
        host.change(utilization_percent=0)
        for _ in range(6):
            assert idle_seconds() is None, f"it is not idle for an hour yet, {busy=}"
            later(IDLE_SECONDS / 6)
        assert idle_seconds() == pytest.approx(IDLE_SECONDS, abs=30), f"{busy=}"
        assert main(["queue", "--dir", str(host.base)]) == 0
        assert "1 of its GPUs idle for 1:00:" in capsys.readouterr().out
        host.change(utilization_percent=busy)
        later(IDLE_SECONDS / 6)
        assert idle_seconds() is None, f"it computes or does not report, {busy=}"
    host.change(utilization_percent=0)
    assert job.queue.take((), 0)  # an attempt on the CPU
    later(2 * IDLE_SECONDS)
    job.wait()
    assert idle_seconds() is None, "it was given back in the meantime"


@pytest.fixture
def second_gpu(machine_with):
    """A machine with two GPUs, the registry of its queue, and a job on the second GPU."""
    machine = machine_with(Gpu(), Gpu())
    registry = Registry(Path(machine.environ["ROBUST_TRAIN_QUEUE_DIR"]))
    job = registry.enter(QueuedJob(name="job", reserved_bytes=4000 * MIB))
    job.update(job.job.on([machine.uuid(1)]))
    yield machine, registry, job
    job.release()
    registry.close()


def test_gpus_marks_a_gpu_left_idle(second_gpu):
    machine, _, job = second_gpu
    job.update(replace(job.job, idle_seconds=(4000,)))
    environ = machine.environment()
    gpus = json.loads(warm.robust_train("gpus", "--json", environ=environ).stdout)["gpus"]
    assert [gpu["idle_seconds"] for gpu in gpus] == [None, 4000]
    _, first, second = warm.robust_train("gpus", environ=environ).stdout.splitlines()
    assert "idle" not in first
    assert second.endswith("idle for 1:06:40 under its job (robust-train queue)")


def test_gpus_names_the_job_that_reserves_one(second_gpu):
    """Its processes, which ``held by`` lists, may not use it yet."""
    machine, _, job = second_gpu
    _, first, second = warm.robust_train("gpus", environ=machine.environment()).stdout.splitlines()
    assert "reserved" not in first
    assert second.endswith(f"reserved by {job.job.shown_id} (robust-train queue)")


# --- drivers that hang ---


def test_a_hanging_waiter_delays_only_itself(host, later):
    """Its driver hangs; it gets its turn later."""
    running = [host.with_gpus(2).job() for _ in range(2)]
    assert [job.wait() for job in running] == [[0], [1]]
    head, behind = host.job(interval_seconds=1.0), host.job()

    def hangs():
        head.driver_hangs = running[1].driver_hangs = True
        assert behind.poll() == []

    def one_ends():
        assert running[1].queue.find_open_gpus() == ()
        assert not running[1].queue.take(["GPU-0"], 4000 * MIB)
        running[0].end()
        assert behind.poll() == [0]

    def it_answers_again():
        head.driver_hangs = False
        running[1].end()

    def time_passes():
        later(UNSEEN_SECONDS + 1)

    assert head.wait(hangs, time_passes, one_ends, it_answers_again) == [1]
    assert "has not answered" in head.said[-1].sentence()


# what programs say on a machine whose driver hangs, sooner than people would hear it
IMPATIENT = "from robust_train.gpu import inventory\ninventory.OPENING_SECONDS = {}\n"


def test_a_hanging_driver_stops_no_command(second_gpu):
    machine, registry, _ = second_gpu
    waiting = registry.enter(QueuedJob(name="other", reserved_bytes=4000 * MIB))
    machine.hang(MEMORY, 0)
    program = """
import contextlib, io, json
from robust_train.cli.main import main
seen = {}
for command in ("doctor", "gpus", "queue"):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main([command])
    seen[command] = [code, shown.getvalue()]
print(json.dumps(seen))
"""
    seen = machine.python(IMPATIENT.format(0.5) + program)
    for name, (code, text) in seen.items():
        assert "has not answered" in text, (name, text)
        assert code == (name == "doctor"), (name, code, text)
    assert "waiting" in seen["queue"][1]
    assert "running" in seen["queue"][1]
    waiting.release()


def test_a_hanging_call_is_made_once(caplog):
    """It is warned of once, too, until it returns."""
    answers, calls = threading.Event(), []
    for limit_seconds in (0.0, 60.0):
        with pytest.raises(NoAnswerError, match=r"has not answered for .* dmesg"):
            ask(lambda: answers.wait(calls.append(1)), limit_seconds)
    assert (len(calls), len(caplog.records)) == (1, 1)
    answers.set()

    def asked_again():
        with contextlib.suppress(NoAnswerError):
            return ask(lambda: 7, 60.0)

    assert wait_until(asked_again, "it answers again") == 7


@pytest.mark.parametrize(
    "function", ["nvmlInit", pytest.param("nvmlDeviceGetCount", marks=pytest.mark.slow)]
)
def test_a_driver_hanging_from_startup_is_named(machine_with, function):
    machine = machine_with(Gpu())
    machine.hang(function)
    reading = "gpus = inventory.read_inventory()\nprint(json.dumps([gpus.answered, gpus.problem]))"
    answered, problem = machine.python(IMPATIENT.format(0.5) + "import json\n" + reading)
    assert not answered
    assert "dmesg" in problem


def test_ctrl_c_is_heard_while_the_driver_hangs(machine_with):
    machine = machine_with(Gpu())
    machine.hang("nvmlInit")
    reads = "try:\n    inventory.read_inventory()\nexcept KeyboardInterrupt:\n    print('heard')"
    process = machine.start(IMPATIENT.format(1e6) + reads)
    wait_until(lambda: machine.calls("nvmlInit"), "it asks")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120) == ("heard\n", "")
