"""When an attempt counts as hanging, and what is said of where it stands."""

import itertools
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attempts import attempt_request
from plans import folder_in
from robust_train.failures.stack import where_it_stands
from robust_train.features.stall import launcher as stall_watch
from robust_train.features.stall.launcher import (
    StallWatch,
    dump_stacks,
    nccl_variables,
    remove_nccl_pipes,
)
from robust_train.features.stall.model import (
    SHORTEST_SECONDS,
    STARTUP_SECONDS,
    Pulse,
    measure_standstill,
)
from robust_train.features.stall.record import Stalled, StallWarning
from robust_train.host.signals import SignalWatch
from robust_train.model.events import (
    JobStarted,
    MemoryReported,
    PauseLearned,
    Progress,
    TrainingStarted,
)
from simulated_nvml import Gpu
from world import SUPPORT

times = st.floats(0, 1e6)


@st.composite
def pulses(draw):
    now = draw(times)
    reported = draw(st.none() | st.floats(0, now))
    alive = draw(st.floats(reported or 0, now))
    return Pulse(now, 0.0, reported, alive, draw(st.floats(0, 1e4)))


def share(limit, pulse):
    return measure_standstill(limit, pulse).share


@given(pulses(), st.floats(1, 1e5))
def test_a_limit_counts_from_the_last_progress(pulse, limit):
    """Before any progress it counts from the last sign of life."""
    assert measure_standstill(0, pulse) is None, "never"
    since = pulse.alive if pulse.reported is None else pulse.reported
    assert (share(limit, pulse) >= 1) == ((pulse.now - since) / limit >= 1)


@given(pulses())
def test_a_learned_limit_has_lower_bounds(pulse):
    """Ten minutes of silence, and half an hour at the start."""
    stands = measure_standstill(None, pulse)
    least = STARTUP_SECONDS if pulse.reported is None else SHORTEST_SECONDS
    assert stands.limit_seconds >= max(least, 5 * pulse.longest)
    if stands.share >= 1 and pulse.now - pulse.alive < least:
        assert pulse.reported is not None
        assert pulse.now - pulse.reported >= 12 * max(least, 5 * pulse.longest)


@given(pulses(), st.none() | st.floats(1, 1e5), st.floats(0, 1))
def test_a_sign_of_life_never_shortens_the_limit(pulse, limit, part):
    later = replace(pulse, alive=pulse.alive + part * (pulse.now - pulse.alive))
    assert share(limit, later) <= share(limit, pulse)


@given(pulses(), st.none() | st.floats(1, 1e5))
def test_progress_renews_all_of_the_time(pulse, limit):
    """Nothing that was learned is lost."""
    after = pulse.after_progress()
    assert share(limit, after) == 0
    assert after.longest >= pulse.longest


@given(st.lists(st.floats(0.1, 4.99), max_size=30), st.floats(1, 590))
def test_ordinary_pauses_do_not_count_as_hanging(factors, first):
    """A job may pause for five times its longest pause so far; evaluation and checkpoints are such
    pauses.
    """
    pulse = replace(Pulse(), now=first).after_progress()
    for factor in factors:
        pulse = replace(pulse, now=pulse.now + factor * pulse.longest)
        assert share(None, pulse) < 1, factor
        pulse = pulse.after_progress()


EVENTS = {
    "begins": TrainingStarted(0),
    "progress": Progress(1),
    "figures": MemoryReported("on request", resident=1),
}


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def monotonic(self):
        return self.now


class Watched:
    """Two processes under a shell, and who watches them; polls are five seconds apart."""

    def __init__(self, folder, clock, runs="sleep 1000"):
        code = f"{runs} & echo $!; sleep 1000 & echo $!; wait"
        self.shell = subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE, text=True)
        self.pids = [int(self.shell.stdout.readline()) for _ in range(2)]
        self.events = []
        self.watch = StallWatch(attempt_request(folder), self.pids, self.events.append)
        self._clock = clock

    def signal(self, signum, *pids):
        for pid in pids:
            os.kill(pid, signum)
            wanted = "T" if signum == signal.SIGSTOP else "S"
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != wanted:
                pass

    def wait(self, seconds, *, printing=False):
        """Return how it stands when it hangs, None if it does not within these seconds."""
        until = self._clock.now + seconds
        while self._clock.now < until:
            self._clock.now += 5.0
            if printing:
                self.watch.output()
            if (stands := self.watch.detect_hang()) is not None:
                return stands
        return None

    def lives_through(self, scene):
        """Let it send events; it may be quiet or print for some seconds, until it hangs."""
        for step in scene.split(", "):
            what, _, seconds = step.partition(" ")
            if what in EVENTS:
                self.watch.event(EVENTS[what])
            else:
                stands = self.wait(float(seconds), printing=what == "prints")
                assert (stands is not None) is (what == "hangs"), step

    def close(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.shell.communicate()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stall_watch, "time", clock)
    return clock


@pytest.fixture
def watched(tmp_path, clock):
    watched = Watched(tmp_path, clock)
    yield watched
    watched.close()


@pytest.mark.parametrize(
    "scene",
    [
        # ten minutes of silence are a hang, or thirty before any progress
        "quiet 1750, hangs 100",
        "begins, progress, quiet 590, hangs 100",
        # who prints has time for a long evaluation
        "begins, progress, prints 7100, hangs 200",
        # what a thread may send is no progress
        "progress, quiet 590, figures, quiet 590, hangs 100",
        # a pause that was longer is learned
        "progress, quiet 400, progress, quiet 1990, hangs 100",
        # a job that reports epochs has the time of the first for each
        "prints 4000, progress, quiet 3990, hangs 100",
    ],
)
def test_an_attempt_hangs(watched, scene):
    watched.lives_through(scene)


def test_a_hang_is_warned_of_once_halfway(watched):
    """The end says for how long it hung."""
    watched.lives_through("quiet 1750, begins, progress, quiet 590")
    assert [type(event) for event in watched.events] == [StallWarning, StallWarning]
    assert watched.wait(100).what.startswith("no progress for 10 min")


def test_notices_name_the_attempt_and_its_limit():
    warning = StallWarning(300.0, 600.0).notice(3)
    assert warning.kind == "stalled"
    assert "no progress for 5 min in attempt 3, which is ended after 10 min" in warning.text
    assert "no progress in attempt 3" in Stalled(600.0).notice(3).text


def test_a_suspended_attempt_does_not_hang(watched):
    """One of which only a part is stopped does."""
    watched.watch.event(Progress(1))
    watched.signal(signal.SIGSTOP, *watched.pids)
    assert watched.wait(2000) is None
    watched.signal(signal.SIGCONT, watched.pids[0])
    stands = watched.wait(700, printing=True)
    assert stands is not None, "output of the other ranks is not a sign of life then"
    assert stands.seconds < 700


def test_time_of_a_suspended_launcher_does_not_count(watched, clock):
    watched.watch.event(Progress(1))
    for day in (1, 2, 3):
        clock.now += 86_400.0
        assert watched.watch.detect_hang() is None, f"day {day}"
    assert watched.wait(500) is None


def test_a_long_pause_counts_in_later_launches(watched, tmp_path):
    watched.lives_through("progress, quiet 400, progress")
    learned = watched.events[-1]
    assert isinstance(learned, PauseLearned)
    assert learned.seconds >= 400
    started = JobStarted(str(tmp_path), "trainer", "c0ffee")
    with folder_in(tmp_path, SignalWatch()) as folder:
        folder.record(started)
        folder.record(learned)
    with folder_in(tmp_path, SignalWatch()) as folder:
        folder.record(started)
        assert folder.state.longest_pause == learned.seconds
        folder.record(replace(started, job="another"))
        assert folder.state.longest_pause is None


def test_copying_and_downloading_count_as_work(tmp_path, clock):
    """They need no CPU time."""
    watched = Watched(tmp_path, clock, runs="cat /dev/zero > /dev/null")
    try:
        watched.lives_through("quiet 4000, progress, quiet 7000")
    finally:
        watched.close()


def test_a_file_rewritten_now_and_then_proves_nothing(watched, monkeypatch):
    """It is not a sign of life."""
    looks = itertools.count()
    monkeypatch.setattr(stall_watch, "bytes_moved_by", lambda process: next(looks) // 32 * 10**6)
    watched.lives_through("progress, quiet 590, hangs 100")


@pytest.mark.parametrize(
    ("percent", "others", "hangs"), [(0, 0, True), (90, 0, False), (90, 5, True)]
)
def test_a_busy_gpu_is_a_sign_of_life(machine_with, percent, others, hangs):
    """It is not if others compute there as well; their process numbers are beyond any process's."""
    compute = [(2**30 + number, 100) for number in range(others)]
    machine = machine_with(Gpu(utilization=percent, compute=compute), Gpu(utilization=90))
    assert hangs is machine.python(
        """
        import os
        from pathlib import Path
        from types import SimpleNamespace
        from attempts import attempt_request
        from robust_train.gpu.inventory import read_inventory
        from robust_train.features.stall import launcher as stall_watch
        from robust_train.model.spec import AttemptSpec

        stall_watch.time = clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        request = attempt_request(Path(), spec=AttemptSpec(read_inventory().gpus[:1], 8, 1))
        watch = stall_watch.StallWatch(request, [os.getpid()], lambda event: None)
        stands = None
        while stands is None and clock.now < 4000:
            clock.now += 4.0
            stands = watch.detect_hang()
        print("true" if stands else "false")
        """,
        PYTHONPATH=str(SUPPORT),
    )


STACKS = """\
process 12 (python train.py, stopped)
Thread 12 MainThread (most recent call first):
  File "/home/u/train.py", line 33 in train
  File "/repo/src/robust_train/attempt/runner.py", line 136 in call_trainer

process 14 (python worker, sleeping)
Thread 14 MainThread (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select

rank 0 (process 11, sleeping)
Thread 0x00 (most recent call first):
  File "/home/u/logger.py", line 9 in beat

Current thread 0x01 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/x.py", line 4 in all_reduce
  File "/home/u/train.py", line 35 in reduce
  File "/repo/src/robust_train/attempt/runner.py", line 136 in call_trainer
rank 1 (process 12, stopped)
"""


OF_RANKS = "rank 1 is stopped by a signal at train.py:33 in train; rank 0 at train.py:35 in reduce"
OF_ONE = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n'
OF_A_PROGRAM = "process 7 (sleep 9, sleeping)"


def test_the_innermost_frames_outside_libraries_are_named():
    assert where_it_stands(STACKS) == OF_RANKS
    assert where_it_stands(OF_ONE) == "at a.py:1 in f"
    assert where_it_stands(f"{OF_A_PROGRAM}\n\n") == OF_A_PROGRAM
    assert where_it_stands("") == ""


def test_reading_ranks_dump_the_flight_recorder(tmp_path):
    """Ranks that read their pipe are asked for its dump."""
    settings = nccl_variables({}, tmp_path, 1)
    stem = settings["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    assert not list(tmp_path.iterdir())
    for rank in range(2):
        os.mkfifo(f"{stem}{rank}.pipe")
    reader = os.open(f"{stem}1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert dump_stacks(attempt_request(tmp_path), {}) > 1
    assert os.read(reader, 128)
    os.close(reader)
    os.mkfifo(tmp_path / "attempt-2.nccl-0.pipe")  # its launcher was killed
    (tmp_path / "attempt-1.stacks").unlink()
    remove_nccl_pipes(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_users_flight_recorder_settings_stay(tmp_path):
    assert nccl_variables({"TORCH_FR_DUMP_TEMP_FILE": "/x"}, tmp_path, 1) == {}
    newer = nccl_variables({"TORCH_FR_BUFFER_SIZE": "9"}, tmp_path, 1)
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in newer, "the user's own size stands"
