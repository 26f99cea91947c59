"""A sweep imports torch and a trainer once; its jobs' fork servers are forks of that."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from robust_train.execution.zygote import MOST_NESTS
from simulated_nvml import Gpu
from sweep_world import SweepWorld, processes_mentioning
from world import is_running, parent_of, wait_until

IN_PROCESSES = "isolation=process"


@pytest.fixture
def at_work(sweeps: SweepWorld, machine_with):
    """A sweep of three jobs on two GPUs; two are at work until the mark ``go`` is made."""
    sweeps.world.with_environ(machine_with(Gpu(), Gpu()).environ)
    process = sweeps.start("forked_trainers.waits", "training.seed=1,2,3", IN_PROCESSES)
    wait_until(lambda: sweeps.pid_at_work(1) and sweeps.pid_at_work(2), "both jobs are at work")
    yield process
    (sweeps.place / "go").touch()
    process.kill()
    process.communicate()


def ancestors(attempt: int) -> tuple[int, int, int]:
    """The fork server of an attempt, the process with its trainer, and the one with torch."""
    server = parent_of(attempt)
    return server, parent_of(server), parent_of(parent_of(server))


def everything_printed(sweeps: SweepWorld) -> str:
    return "".join(path.read_text() for path in sweeps.folder.rglob("output.log"))


def test_torch_and_the_trainer_are_imported_once_for_all_jobs(sweeps: SweepWorld):
    sweeps.world.environ["PYTHONPROFILEIMPORTTIME"] = "1"  # each process tells what it imports
    ended = sweeps.sweep(
        "forked_trainers.where_it_came_from", "training.seed=1,2,3", IN_PROCESSES, n_jobs=2
    )
    assert ended.returncode == 0, ended.output
    lines = (ended.output + everything_printed(sweeps)).splitlines()
    imports = [line.rpartition("| ")[2].strip() for line in lines if "import time:" in line]
    assert imports.count("torch.nn") == 1
    assert imports.count("colorsys") == 1, "only forked_trainers imports that"
    assert [result["gradient"] for result in sweeps.column("result")] == [[2.0] * 3] * 3


def test_each_job_has_a_fork_server_and_a_session_of_its_own(sweeps: SweepWorld):
    sweeps.world.environ["OF_THIS_JOB"] = "from the command line"
    ended = sweeps.sweep(
        "forked_trainers.where_it_came_from",
        "training.seed=1,2,3",
        "+hydra.job.env_set.OF_THIS_JOB=job-${hydra.job.num}",
        IN_PROCESSES,
    )
    assert ended.returncode == 0, ended.output
    results = sweeps.column("result")
    assert len({result["imported_by"] for result in results}) == 1
    assert len({result["server"] for result in results}) == 3
    assert all(result["session"] == result["server"] for result in results)
    assert [result["own"] for result in results] == ["job-0", "job-1", "job-2"]
    assert {result["cwd"] for result in results} == {str(sweeps.world.folder)}
    short = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
    assert [result["openmp"] for result in results] == [short] * 3


def test_no_descriptor_of_a_job_is_open_in_another_or_in_what_they_are_forked_from(
    sweeps: SweepWorld, at_work
):
    attempts = [sweeps.pid_at_work(1), sweeps.pid_at_work(2)]
    (server_1, nest, zygote), (server_2, *same) = map(ancestors, attempts)
    assert same == [nest, zygote]
    queue = sweeps.world.environ["ROBUST_TRAIN_QUEUE_DIR"]
    launchers = [launcher_of(sweeps.folder / str(number)) for number in (0, 1)]
    families = list(zip(launchers, (server_1, server_2), attempts, strict=True))
    of_all = descriptors(at_work.pid, queue)
    for (launcher, server, attempt), other_family in (families, reversed(families)):
        elsewhere = of_all.union(
            *(descriptors(pid, queue) for pid in (nest, zygote, *other_family))
        )
        held = descriptors(attempt, queue)
        assert any(name.startswith(queue) for name in held), "its reservation"
        assert not held & elsewhere
        assert not descriptors(server, queue) & elsewhere
        its_own = descriptors(launcher, queue) - of_all
        assert held & its_own, "its output and its reservation"
        assert its_own & elsewhere == set()
    results = [
        {name for name in descriptors(pid, queue) if "job-result" in name} for pid in launchers
    ]
    assert [len(result) for result in results] == [1, 1]
    assert results[0] != results[1]


def launcher_of(folder: Path) -> int:
    """The process of a job of the sweep: its output goes into the job's log."""
    log = str(folder / "output.log")
    found = [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and target(process / "fd" / "1") == log
    ]
    assert len(found) == 1, found
    return found[0]


def target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def descriptors(pid: int, queue: str) -> set[str]:
    """Pipes, sockets, memory files and reservations that a process has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        name = target(link)
        if name.startswith(("pipe:", "socket:")) or (name.startswith(queue) and "/job." in name):
            found.add(name)
        elif name.startswith("/memfd:"):
            found.add(f"{name}:{link.stat().st_ino}")
    return found


def test_what_a_trainers_import_changes_is_seen_by_its_own_jobs_only(sweeps: SweepWorld):
    """With more trainers than are kept imported, so that one is imported again."""
    trainers = [
        "trainer_that_seeds.train",
        "trainer_that_looks_around.train",
        "sweep_trainers.objective",
        "sweep_trainers.fails_at_2",
        "sweep_trainers.counts_those_at_work",
        "trainer_that_looks_around.train",
    ]
    assert len({*trainers}) > MOST_NESTS
    ended = sweeps.sweep(",".join(trainers), "training.seed=1", IN_PROCESSES)
    assert ended.returncode == 0, ended.output
    assert sweeps.column("result")[1:] == [False, 1.5, 1.0, 1, False]


def test_jobs_draw_different_random_numbers_unless_their_module_seeds_them(sweeps: SweepWorld):
    trainers = "forked_trainers.draws,trainer_that_seeds.train"
    ended = sweeps.sweep(trainers, "training.seed=1,2", IN_PROCESSES)
    assert ended.returncode == 0, ended.output
    drawn_1, drawn_2, seeded_1, seeded_2 = sweeps.column("result")
    assert drawn_1 != drawn_2
    assert seeded_1 == seeded_2


def test_what_an_attempt_detached_ends_with_it(sweeps: SweepWorld):
    trainer = "forked_trainers.leaves_a_process_behind"
    ended = sweeps.sweep(trainer, "training.seed=1,2", IN_PROCESSES, n_jobs=1)
    assert ended.returncode == 0, ended.output
    assert sweeps.column("result") == [True, False]


@pytest.mark.parametrize(
    ("module", "does"),
    [("trainer_that_starts_a_thread", "a thread"), ("trainer_that_starts_cuda", "CUDA")],
)
def test_a_module_that_must_not_be_forked_gets_fresh_interpreters(
    sweeps: SweepWorld, cuda_machine_with, module: str, does: str
):
    sweeps.world.with_environ(cuda_machine_with(Gpu(), Gpu()).environ)
    ended = sweeps.sweep(f"{module}.train", "training.seed=1,2", IN_PROCESSES)
    assert ended.returncode == 0, ended.output
    assert sweeps.column("status") == ["completed", "completed"]
    for number in (0, 1):
        log = (sweeps.folder / str(number) / "output.log").read_text()
        assert f"{module} starts {does} when it is imported" in log


def test_an_import_that_crashes_is_told_by_each_job(sweeps: SweepWorld):
    ended = sweeps.sweep("trainer_that_crashes_its_import.train", "training.seed=1,2", IN_PROCESSES)
    assert ended.returncode == 1, ended.output
    assert all("SIGSEGV" in reason for reason in sweeps.column("reason"))


def test_a_trainer_that_is_not_there_is_refused_by_each_job(sweeps: SweepWorld):
    ended = sweeps.sweep("nowhere", "training.seed=1,2", IN_PROCESSES)
    assert ended.returncode == 2, ended.output
    assert sweeps.column("status") == ["refused", "refused"]
    assert all("has no 'nowhere'" in reason for reason in sweeps.column("reason"))


def test_running_jobs_survive_the_zygote_and_later_ones_do_without(sweeps: SweepWorld, at_work):
    servers = [ancestors(sweeps.pid_at_work(number)) for number in (1, 2)]
    (_, nest, zygote), _ = servers
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: not is_running(nest), "what was forked from it to fork ends with it")
    (sweeps.place / "go").touch()
    ended = sweeps.end(at_work)
    assert ended.returncode == 0, ended.output
    assert "the process that jobs are forked from was ended by SIGKILL" in ended.output
    assert sweeps.column("result")[:2] == [nest, nest]
    assert sweeps.column("result")[2] != nest


def test_when_only_the_process_with_the_trainer_is_killed_there_is_another(
    sweeps: SweepWorld, at_work
):
    _, nest, zygote = ancestors(sweeps.pid_at_work(1))
    os.kill(nest, signal.SIGKILL)
    (sweeps.place / "go").touch()
    ended = sweeps.end(at_work)
    assert ended.returncode == 0, ended.output
    assert sweeps.column("result")[:2] == [nest, nest]
    assert sweeps.column("result")[2] not in (nest, zygote)


def test_a_killed_fork_server_is_an_outcome_of_its_job_alone(sweeps: SweepWorld, at_work):
    attempt = sweeps.pid_at_work(1)
    os.kill(parent_of(attempt), signal.SIGKILL)
    wait_until(lambda: not is_running(attempt), "the attempt ends with its server")
    (sweeps.place / "go").touch()
    ended = sweeps.end(at_work)
    assert ended.returncode == 1, ended.output
    assert sweeps.column("status") == ["failed", "completed", "completed"]
    assert "SIGKILL" in sweeps.summary(0)["attempts"][0]["message"]


def test_a_killed_sweep_leaves_nothing_behind_and_its_jobs_a_checkpoint(sweeps: SweepWorld):
    trainer = "forked_trainers.waits_until_told"
    process = sweeps.start(trainer, "training.seed=1,2,3", IN_PROCESSES)
    wait_until(lambda: sweeps.pid_at_work(1) and sweeps.pid_at_work(2), "both jobs are at work")
    family = {*ancestors(sweeps.pid_at_work(1)), *ancestors(sweeps.pid_at_work(2))}
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_running, family)), "servers and zygote end")
    wait_until(lambda: not processes_mentioning(str(sweeps.place)), "nothing is left behind")
    for number in (0, 1):
        assert sweeps.summary(number)["checkpoint"].endswith("when-told")


def test_a_job_that_is_killed_takes_its_server_along_and_no_other(sweeps: SweepWorld, at_work):
    attempts = [sweeps.pid_at_work(1), sweeps.pid_at_work(2)]
    os.kill(launcher_of(sweeps.folder / "0"), signal.SIGKILL)
    wait_until(lambda: not is_running(attempts[0]), "its attempt ends")
    assert is_running(attempts[1])
    (sweeps.place / "go").touch()
    ended = sweeps.end(at_work)
    assert ended.returncode == 1, ended.output
    assert sweeps.column("status") == ["died", "completed", "completed"]
