"""How the end of an attempt's process, in any form, becomes an outcome. Real processes."""

import signal
import subprocess
import time

import pytest

from robust_train import ConfigError, launch
from robust_train.children import interpreters
from robust_train.gpu.visible import NAMES_VARIABLE, numbers_gpus
from robust_train.launcher import running_attempt
from robust_train.launcher.hooks import End, Watch
from robust_train.model.events import Progress
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.spec import AttemptSpec
from robust_train.readable import GIB


def test_the_second_parameter_is_the_run(attempts):
    assert attempts.run("trainers.uses_run").result == {
        "attempt": 1,
        "resume_checkpoint": None,
        "checkpoint_dir": str(attempts.run_dir / "checkpoints"),
    }


def test_a_callable_object_is_a_trainer(attempts):
    assert attempts.run("trainers.instance").result == 8


class HasHung(Watch):
    """Takes an attempt for one that hangs once it has reported a step."""

    def __init__(self, request, pids, send):
        self.has_begun = False

    def event(self, event):
        self.has_begun |= isinstance(event, Progress)

    def poll(self, processes):
        return End(kill_in_seconds=0.0) if self.has_begun else None

    def explain(self, stacks):
        return Failure(FailureKind.COMM, "it hangs")


@pytest.mark.parametrize(("mps", "returncode"), [(False, -signal.SIGKILL), (True, 0)])
def test_a_hang_under_mps_is_asked_first(attempts, mps, returncode):
    """SIGKILL in the middle of a kernel may break the server for its other clients."""
    gpu = GpuInfo("GPU-0", "A100", 0, "00", GIB, GIB, 0, mps=mps)
    more = {"spec": AttemptSpec((gpu,), 8, 1), "watches": (f"{__name__}:HasHung",)}
    outcome = attempts.run("trainers.reports_until_told", more=more)
    assert outcome.exit.returncode == returncode
    assert outcome.failure.message == "it hangs"


SCRIPT = "robust_train.attempt.script.command.train"
CHILD_KILLED = 'import subprocess; subprocess.check_call(["sh", "-c", "kill -KILL $$"])'


def argv(*words):
    return {"trainer": {"argv": list(words)}}


@pytest.mark.parametrize(
    ("trainer", "keys", "kind", "words"),
    [
        ("trainers.dies_of_segfault", {}, FailureKind.BUG, "SIGSEGV"),
        ("trainers.calls_sys_exit", {}, FailureKind.BUG, "sys.exit(3)"),
        ("trainers.calls_os_exit", {}, FailureKind.BUG, "without returning"),
        ("trainers.dies_of_sigkill", {}, FailureKind.INTERRUPTED, "SIGKILL"),
        (SCRIPT, argv("sh", "-c", "exit 3"), FailureKind.BUG, "exit code 3"),
        (SCRIPT, argv("sh", "-c", "kill -KILL $$"), FailureKind.INTERRUPTED, "SIGKILL"),
        (
            SCRIPT,
            argv("python3", "-c", CHILD_KILLED),
            FailureKind.INTERRUPTED,
            "died with <Signals.SIGKILL",
        ),
    ],
)
def test_a_process_that_dies_is_an_outcome(attempts, trainer, keys, kind, words):
    outcome = attempts.run(trainer, **keys)
    assert outcome.failure.kind is kind
    assert words in outcome.failure.message
    if "segfault" in trainer:
        assert "in dies_of_segfault" in str(outcome.traceback)
        assert "in dies_of_segfault" in (attempts.run_dir / "attempt-1.stacks").read_text()


def test_a_script_gets_no_terminal_of_its_own(attempts, monkeypatch):
    """If the launcher has none. A script needs neither torch nor the file of its events, which it
    may have removed.
    """
    monkeypatch.setattr(interpreters, "subprocess", subprocess)  # as users' start, not as a fork
    looks = "test -t 1 || echo pipe; grep -c libtorch /proc/$PPID/maps"
    removes = 'rm "$ROBUST_TRAIN_EVENTS"'
    assert attempts.run(SCRIPT, **argv("sh", "-c", f"{looks}; {removes}")).failure is None
    assert (attempts.run_dir / "attempt-1.log").read_text().split() == ["pipe", "0"]


def test_a_completed_result_counts_despite_a_hanging_exit(attempts, monkeypatch, caplog):
    monkeypatch.setattr(running_attempt, "AFTER_FINISHED_SECONDS", 0.3)
    outcome = attempts.run("trainers.completes_but_does_not_end", stop_grace_seconds=1000)
    assert (outcome.failure, outcome.result) == (None, "done")
    assert "the trainer has returned, but its process has not ended in 0.3 s" in caplog.text


def test_exit_handlers_of_a_finished_trainer_complete(attempts):
    """Even if a stop leaves no time at all for a checkpoint."""
    outcome = attempts.run("trainers.uploads_at_exit", stop_grace_seconds=0)
    assert (outcome.failure, outcome.result) == (None, "done")
    assert (attempts.run_dir / "uploaded").exists()


def test_a_failed_attempt_is_killed_after_some_seconds(attempts, monkeypatch):
    """Its process cannot end, for example because a destructor sleeps; the failure is the one
    reported.
    """
    monkeypatch.setattr(running_attempt, "AFTER_FAILURE_SECONDS", 0.3)
    started = time.monotonic()
    outcome = attempts.run("trainers.fails_but_does_not_end", stop_grace_seconds=1000)
    assert outcome.failure.kind is FailureKind.BUG
    assert "why it failed" in outcome.failure.message
    assert time.monotonic() - started < 60


def test_no_interpreter_starts_while_memory_is_short(attempts, monkeypatch):
    """The failed attempt may hold its memory for some seconds yet."""
    start, started = interpreters.Interpreters.start, []

    def counted(of):
        started.append(of)
        return start(of)

    monkeypatch.setattr(interpreters.Interpreters, "start", counted)
    assert attempts.run("trainers.runs_out_of_memory").failure.kind is FailureKind.HOST_OOM
    assert len(started) == 1


def test_openmp_spins_briefly_unless_the_user_wants_more(attempts, monkeypatch):
    given = attempts.run("trainers.openmp_settings").result
    assert given == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert attempts.run("trainers.openmp_settings").result == {"OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.parametrize(
    ("names", "reads_uuids", "by_index"),
    [
        (None, False, True),
        ("", True, False),
        ("auto", True, False),
        ("index", True, True),
        ("uuid", False, False),
    ],
)
def test_scripts_get_gpu_indices_and_functions_get_uuids(names, reads_uuids, by_index):
    environ = {} if names is None else {NAMES_VARIABLE: names}
    assert numbers_gpus(environ, reads_uuids=reads_uuids) is by_index


def test_misspelt_names_of_gpus_refuse_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv(NAMES_VARIABLE, "indices")
    with pytest.raises(ConfigError, match=f"{NAMES_VARIABLE}=indices: must be one of auto, uuid"):
        launch(lambda cfg: None, {"device": "cpu"}, run_dir=tmp_path)
