"""Interpreters of a job: what they import and when, and that none outlives the job."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

import warm
from robust_train.children.interpreters import Interpreters, request_imports
from robust_train.host.linux import wait_until_readable
from robust_train.host.wire import EventSender, read_events
from robust_train.launcher.process import has_room_for_standby
from robust_train.model.events import Prepared
from robust_train.readable import MIB
from simulated_nvml import Gpu
from world import ROOT, is_running, wait_for_text, wait_until


@pytest.fixture
def interpreters():
    pool = Interpreters()
    yield pool
    pool.close()


def prepared(interpreters, *modules):
    interpreter = interpreters.start()
    interpreter.prepare(request_imports(modules))
    interpreters.await_prepared([interpreter])
    return interpreter


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("print('loud', flush=True)\n1 / 0\n", None),
        ("import os\nos.write(2, b'terminate called')\nos.abort()\n", -signal.SIGABRT),
    ],
    ids=["fails", "ends the process"],
)
def test_a_failed_import_is_left_to_the_attempt(
    interpreters, tmp_path, monkeypatch, code, returncode
):
    """The interpreter adds no words of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "falls_over.py").write_text(code)
    interpreter = prepared(interpreters, "no_such_module", "falls_over", "json")
    assert (interpreter.returncode, interpreter.is_usable) == (returncode, returncode is None)
    interpreters.pump.drain()
    assert interpreters.pump.tail == ""


def test_a_limit_without_marks_is_reported_once(interpreters, caplog):
    """A limit that leaves the job without marks."""
    pids = [interpreters.start().pid for _ in range(2)]
    for pid in pids:
        resource.prlimit(pid, 10, (5, 5))
    interpreters.mark("1-ffffff")
    assert [record.message[:17] for record in caplog.records] == ["ulimit -Hx is 5: "]


def test_a_changed_environment_makes_an_interpreter_useless(interpreters, monkeypatch):
    interpreter = prepared(interpreters)
    monkeypatch.setenv("ROBUST_TRAIN_RUN_DIR", "/x")
    assert interpreter.is_usable
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not interpreter.is_usable


def test_an_interpreters_end_and_peak_memory_are_known(interpreters):
    interpreter = prepared(interpreters)
    interpreter.signal(signal.SIGKILL)
    wait_until(lambda: interpreters.poll() or not interpreter.is_running, "its end is reported")
    assert interpreter.returncode == -signal.SIGKILL
    assert interpreter.max_resident_bytes > 1 << 20


def test_a_useless_interpreter_ends_in_silence(interpreters):
    """No one has read its answer."""
    interpreter = interpreters.start()
    interpreter.prepare(request_imports(()))
    assert wait_until_readable([interpreter.channel.fileno()], 60.0)
    interpreter.channel.close()
    wait_until(lambda: interpreters.poll() or not interpreter.is_running, "its end is reported")
    interpreters.forget(interpreter)
    interpreters.pump.drain()
    assert (interpreter.returncode, interpreters.pump.tail) == (0, "")


def test_a_standby_takes_little_of_the_free_memory():
    available = psutil.virtual_memory().total
    assert has_room_for_standby(1 << 20)
    assert not has_room_for_standby(available)


@pytest.fixture
def libraries(monkeypatch, cuda_machine_with):
    """A machine with a GPU, and a library that starts CUDA when it is imported."""
    for name, value in cuda_machine_with(Gpu()).environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.syspath_prepend(str(ROOT / "tests/support/libraries"))
    # a fork of a prepared process has its libraries already, an interpreter finds these
    monkeypatch.setattr("robust_train.children.interpreters.subprocess", subprocess)


def test_a_standby_that_has_started_cuda_ends(libraries, interpreters):
    """Its context takes memory of a GPU that nobody has reserved for it."""
    interpreter = interpreters.start()
    interpreter.prepare(request_imports(["json", "starts_cuda", "csv"], is_standby=True))
    wait_until(
        lambda: [interpreters.poll(), interpreter.is_running] == [False, False], "it ends by itself"
    )
    assert list(interpreter.read()) == []
    assert (interpreter.returncode, interpreter.is_unfit, interpreter.culprit) == (
        0,
        True,
        "starts_cuda",
    )


def test_answers_are_read_despite_unread_words():
    """A socket that is closed like this reports a reset before it gives what was sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    EventSender(theirs)(Prepared(culprit="a_library"))
    ours.send(b"unread")
    theirs.close()
    with ours:
        assert [event.culprit for event in read_events(ours)] == ["a_library"]


ASKS_TORCH = """
import os, pathlib, torch
torch.cuda.is_available()
pathlib.Path(os.environ["ANSWER_FILE"]).write_text(str(torch.cuda._nvml_based_avail()))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_a_standby_may_ask_torch_for_gpus(interpreters, tmp_path, monkeypatch):
    """torch asks NVML then, and starts no driver."""
    answer = tmp_path / "answer"
    monkeypatch.setenv("ANSWER_FILE", str(answer))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "asks_torch.py").write_text(ASKS_TORCH)
    interpreter = interpreters.start()
    interpreter.prepare(request_imports(["asks_torch"], is_standby=True))
    interpreters.await_prepared([interpreter])
    assert interpreter.is_usable
    assert answer.read_text() == "True"


WORDS = ("trainer._target_=trainers.hides_a_helper", "max_retries=1")


def _start(world):
    """Start a job; return it and the process ids that its trainer writes down."""
    names = world.folder / "pids"
    world.environ["PIDS_FILE"] = str(names)
    process = world.start(*WORDS)
    wait_until(lambda: names.exists() and names.read_text().count("\n") == 2, "it trains")
    pids = {name: int(pid) for name, pid in map(str.split, names.read_text().splitlines())}
    reaper = 0
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that it asked something
            if child.name() == "job-reaper":
                reaper = child.pid
    assert reaper
    return process, {**pids, "launcher": process.pid, "reaper": reaper}


def _kill(pids, names):
    for name in names:
        os.kill(pids[name], signal.SIGKILL)


@pytest.mark.parametrize(
    "killed",
    [
        ("launcher", "attempt"),
        pytest.param(("launcher",), marks=pytest.mark.slow),
        pytest.param(("attempt",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_detached_helper_does_not_outlive_the_job(world, killed):
    """A helper with its own session and no environment."""
    process, pids = _start(world)
    _kill(pids, killed)
    world.end(process)
    for name, pid in pids.items():
        wait_until(lambda pid=pid: not is_running(pid), f"{name} ends")


@pytest.mark.parametrize(
    "order",
    [
        ("launcher", "reaper", "attempt"),
        pytest.param(("launcher", "reaper"), marks=pytest.mark.slow),
        pytest.param(("reaper", "launcher"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "ended_by",
    [
        "stop",
        pytest.param("stop by id", marks=pytest.mark.slow),
        pytest.param("the next launch", marks=pytest.mark.slow),
    ],
)
def test_leftovers_keep_their_gpu_until_they_end(world, machine_with, order, ended_by):
    """After a killed job they are named and ended."""
    world.with_environ(machine_with(Gpu()).environ)
    process, pids = _start(world)
    _kill(pids, order)
    world.end(process)
    helper = pids["helper"]
    shown = warm.robust_train("queue", environ=world.environ).stdout
    job = shown.splitlines()[1].split()[0]
    assert "GPU 0" in shown
    assert f"(pid {pids['launcher']}) has ended and left pid " in shown
    assert f"pid {helper} (sleep)" in shown
    if ended_by == "the next launch":
        ended = world.end(world.start(*WORDS, "resume=false"))
        assert f"pid {helper} (sleep)" in ended.output
    else:
        which = job if ended_by == "stop by id" else str(world.run_dir)
        done = warm.robust_train("stop", which, environ=world.environ)
        assert done.returncode == 0, done.stderr
        assert f"pid {helper} (sleep)" in done.stdout
    assert not is_running(helper)
    assert "no job holds" in warm.robust_train("queue", environ=world.environ).stdout


def test_the_reapers_name_contains_neither_package_nor_python(world):
    """So ``pkill`` leaves it to clean up after the others."""
    world.alone = True
    process, pids = _start(world)
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    reaper = psutil.Process(pids["reaper"])
    assert reaper.ppid() == process.pid
    assert reaper.name() == "job-reaper"
    assert not any("robust" in word for word in reaper.cmdline()[1:])
    process.terminate()
    world.end(process)


DIES_EARLY = """
import os, signal, sys
if "trainers" not in sys.modules:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_module_that_exits_is_the_attempts_matter(world):
    """Its import would end the interpreter before the attempt."""
    (world.folder / "fragile.py").write_text(DIES_EARLY)
    world.environ["PYTHONPATH"] = f"{world.folder}:{world.environ['PYTHONPATH']}"
    trainer = ("trainer._target_=trainers.what_it_was_given", "max_retries=0")
    ended = world.run(*trainer, "trainer.preload_modules=[fragile]", code=0)
    assert "importing libraries early ended the process (SIGKILL)" in ended.output


# a standby of torch takes as much, and is started where that is little
@pytest.mark.skipif(
    not has_room_for_standby(600 * MIB), reason="too little memory is free for a standby"
)
def test_a_retry_starts_with_its_predecessors_imports(world):
    world.alone = True
    trainer = "trainer._target_=trainers.waits_for_the_standby"
    ended = world.run(trainer, "max_retries=1", code=0)
    assert ended.summary["result"] == {"was_there": True, "ours_imported_later": []}


def test_one_foreign_byte_does_not_hang_the_ranks(world):
    port_file = world.folder / "port"
    world.environ["PORT_FILE"] = str(port_file)
    world.environ["GO_FILE"] = str(world.folder / "go")
    trainer = "trainer._target_=trainers.meets_after_a_foreign_byte"
    process = world.start(trainer, "num_gpus=2", "auto_device=false", "device=cpu")
    port = int(wait_for_text(port_file, "the store is up"))
    with socket.create_connection(("127.0.0.1", port)) as foreign:
        foreign.sendall(b"\x01")
        (world.folder / "go").touch()
        ended = world.end(process, 0)
    assert ended.summary["result"] == 2
