"""Started as a rank by another engine: real ``torchrun`` on this machine, and the pure parts."""

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import warm
from guest_trainers import undisturbed
from robust_train.host.engine import first_host, guest_rank
from robust_train.host.store_votes import StoreVotes
from robust_train.launcher.rank_ends import RankEnd
from robust_train.launcher.rank_failures import find_cause
from robust_train.model.errors import ConfigError
from robust_train.model.events import Failed
from robust_train.model.failure import Clue, Failure, FailureKind
from world import World, wait_until

SCRIPT = Path(__file__).parents[1] / "support" / "guest_trainers.py"
ROOT = Path(__file__).parents[2]
SMALL = (
    "min_batch_size=1",
    "training.num_workers=0",
    "seed=3",
    "training.checkpoint_every_steps=2",
    "auto_device=false",
    "device=cpu",
)
TORCHRUN = ("-m", "torch.distributed.run")


def cold(argv, cwd, environ):
    """Start an interpreter as users do."""
    surroundings = {"cwd": cwd, "env": environ, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        [sys.executable, *argv], stdout=subprocess.PIPE, text=True, **surroundings
    )


@dataclass
class Agents:
    """Agents of torchrun on the loopback, which share a run folder."""

    world: World

    @property
    def run_dir(self):
        return self.world.run_dir

    def start(self, *options, trouble=""):
        argv = (*TORCHRUN, *options, SCRIPT, self.run_dir)
        return cold(argv, self.world.folder, {**self.world.environ, "TROUBLE": trouble})

    def run(self, *options, trouble=""):
        process = self.start("--standalone", "--nproc-per-node=2", *options, trouble=trouble)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def tasks(self, *command, trouble="", start=cold, count=2):
        """Start tasks as srun does: ranks without an agent."""
        srun = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": str(free_port()),
            "TROUBLE": trouble,
        }
        argv = command or (SCRIPT, self.run_dir)
        environ = {**self.world.environ, **srun}
        numbers = ({"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in map(str, range(count)))
        return [start(argv, self.world.folder, environ | each) for each in numbers]

    def end(self, tasks, fails=False):
        """Wait until all tasks have completed, or failed; return what they printed."""
        outputs = [task.communicate(timeout=240)[0] for task in tasks]
        assert {bool(task.returncode) for task in tasks} == {fails}, outputs
        return "".join(outputs)

    @property
    def summary(self):
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def sizes(self):
        return sizes_in(self.run_dir)

    def has_the_weights_of_an_undisturbed_run(self):
        return self.summary["result"] == pytest.approx(undisturbed(), abs=1e-12)


def sizes_in(run_dir):
    """Return micro-batch and accumulation of each attempt."""
    lines = map(json.loads, (run_dir / "journal.jsonl").read_text().splitlines())
    names = "batch_size", "gradient_accumulation_steps"
    started = (e["spec"] for e in lines if e["event"] == "attempt_started")
    return [tuple(spec[name] for name in names) for spec in started]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def agents(world):
    return Agents(world)


def test_restarted_tasks_resume_with_half_the_batch(agents):
    """They repeat a step first. The ranks are those of torchrun, without its agent and the imports
    of each.
    """
    tasks = agents.tasks(trouble="runs_out_in_step=3 runs_out=5", start=warm.start)
    assert "step 3: out of memory" in agents.end(tasks, fails=True)
    output = agents.end(agents.tasks(trouble="runs_out=5", start=warm.start))
    assert "out of memory on the GPU (rank 1): micro-batch 8 → 4" in output
    assert agents.sizes == [(8, 1), (4, 2)]
    assert agents.has_the_weights_of_an_undisturbed_run()


@pytest.mark.slow
def test_more_tasks_share_the_same_effective_batch(agents):
    """The next start has another number of them."""
    agents.world.environ["BATCH_SIZE"] = "4"
    agents.end(agents.tasks(trouble="runs_out=5", start=warm.start), fails=True)
    agents.end(agents.tasks(start=warm.start, count=4))
    assert agents.sizes == [(4, 2), (2, 2)]
    assert agents.has_the_weights_of_an_undisturbed_run()


@pytest.mark.slow
@pytest.mark.proves("functions (`run.backward`)", "under torchrun", "in the step")
@pytest.mark.proves("functions (`run.backward`)", "under torchrun", "new attempt")
def test_all_ranks_repeat_a_step_together(agents):
    """A restart has half the batch, and one more the same."""
    code, output = agents.run(
        "--max-restarts=2", trouble="runs_out_in_step=3 runs_out=5 is_killed=8"
    )
    assert code == 0, output
    assert "step 3: out of memory" in output
    assert agents.sizes == [(8, 1), (4, 2), (4, 2)]
    assert "out of memory on the GPU (rank 1): micro-batch 8 → 4" in output
    assert "rank 1 was killed: the same again" in output
    assert agents.has_the_weights_of_an_undisturbed_run()


@pytest.mark.slow
def test_an_engine_does_not_rerun_a_bug(agents):
    """The user runs the job again."""

    def fails(trouble):
        return agents.end(agents.tasks(trouble=trouble), fails=True)

    assert "a bug of mine" in fails("has_a_bug=4")
    agents.world.environ["SLURM_RESTART_COUNT"] = "1"
    assert "a bug of mine (rank 1); nothing is started, because srun has restarted" in fails("")
    assert agents.sizes == [(8, 1)]
    del agents.world.environ["SLURM_RESTART_COUNT"]
    agents.end(agents.tasks())  # mended
    assert agents.has_the_weights_of_an_undisturbed_run()


@pytest.mark.slow
@pytest.mark.proves("functions (`run.backward`)", "under torchrun", "new attempt")
def test_ranks_end_with_their_agent_and_resume(agents):
    """They resume at the next start."""
    port = free_port()
    options = ("--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}")
    options += ("--rdzv-backend=c10d", f"--rdzv-id=job{port}", "--local-addr=127.0.0.1")
    both = [agents.start(*options, trouble="loses_agent=5") for _ in range(2)]
    for process in both:
        process.communicate(timeout=240)
    assert all(process.returncode for process in both)
    agents.end(agents.tasks(trouble="loses_agent=5"))
    assert agents.sizes == [(8, 1), (8, 1)]
    assert agents.has_the_weights_of_an_undisturbed_run()


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
def test_stopping_all_srun_tasks_saves_one_step(agents):
    """The next start resumes from it."""
    agents.world.environ["AUTO_DEVICE"] = "1"
    tasks = agents.tasks(trouble="waits=5")
    wait_until(lambda: len([*agents.run_dir.glob("waits-*")]) == 2, "both ranks to wait")
    queue = warm.robust_train("queue", "--json", environ=agents.world.environ).stdout
    for task in tasks:
        task.send_signal(signal.SIGTERM)
    output = "".join(task.communicate(timeout=120)[0] for task in tasks)
    gpus = [[gpu["index"] for gpu in job["gpus"]] for job in json.loads(queue)["jobs"]]
    assert sorted(gpus) == [[0], [1]], queue
    ranks = agents.run_dir / "ranks"
    left = [json.loads((ranks / f"attempt-1.rank-{k}.json").read_text()) for k in (0, 1)]
    assert [ending["event"]["failure"]["kind"] for ending in left] == ["interrupted"] * 2, output
    assert {ending["event"]["step"] for ending in left} == {5}
    assert "continues after a stop of all ranks" in agents.end(agents.tasks())
    assert agents.has_the_weights_of_an_undisturbed_run()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate"])
def test_a_frameworks_job_learns_like_torchruns_ranks(agents, framework):
    pytest.importorskip(framework)
    world = agents.world
    folder = world.folder / "two"
    words = (f"trainer._target_=conformance_trainers.{framework}", *SMALL)

    def weights(name):
        return torch.tensor(json.loads((world.folder / name).read_text())).flatten().tolist()

    files = {"READY_FILE": world.folder / "ready", "WEIGHTS_FILE": world.folder / "of one"}
    world.environ |= {name: str(path) for name, path in files.items()}
    world.run(*words, "training.batch_size=8", code=0)
    world.environ |= {"WEIGHTS_FILE": str(world.folder / "of two"), "MEETS": "out of memory"}
    ranks = (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    batch = ("training.batch_size=4", "training.effective_batch_size=8")
    job = (ROOT / "train_robust.py", *words, *batch, f"hydra.run.dir={folder}")
    two = cold((*ranks, *job), world.folder, world.environ)
    output, _ = two.communicate(timeout=240)
    assert two.returncode == 0, output
    assert sizes_in(folder) == [(4, 1), (2, 2)]
    assert weights("of two") == pytest.approx(weights("of one"), abs=1e-5)


@pytest.mark.slow
def test_train_robust_py_uses_the_engines_job_id(agents):
    """Its folder is named by it. Without an id it would be another folder for each rank and
    restart.
    """
    small = ("model.width=4", "training.num_workers=0", "training.epochs=1")
    command = (ROOT / "train_robust.py", *small, "auto_device=false", "device=cpu")
    agents.end(agents.tasks(*command))
    folder = agents.world.folder / "outputs/slurm-4711"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert [attempt["ranks"] for attempt in summary["attempts"]] == [2]
    ranks = {**agents.world.environ, "RANK": "1", "WORLD_SIZE": "2"}
    refused = warm.run(command, ranks)
    assert refused.returncode == 2
    assert refused.stderr.startswith("the run folder must be the same for all ranks")


# --- which rank -----------------------------------------------------------------------------------

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "a/b"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # ordinary launchers: nothing set, one rank, a rank of ours, a shell or submitit
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (TORCH | {"TORCHELASTIC_RUN_ID": "robust_train"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (TORCH, ("torchrun", 3, 4, 1, "torchrun-a_b", 0)),
        (
            TORCH | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"},
            ("torchrun", 3, 4, 1, None, 2),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("the engine that started this rank", 1, 2, 0, None, 0)),
        (SLURM | {"SLURM_RESTART_COUNT": "1"}, ("srun", 4, 5, 1, "slurm-4711", 1)),
    ],
)
def test_a_rank_of_an_engine_is_recognised(environ, expected):
    rank = guest_rank(environ)
    names = "engine", "rank", "world_size", "local_rank", "job", "restarts"
    assert (rank and tuple(getattr(rank, name) for name in names)) == expected


def test_srun_s_ranks_get_what_torch_reads():
    assert guest_rank(SLURM).environ == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "19711",
    }
    exported = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
    assert guest_rank(SLURM | exported).environ.items() >= exported.items()


def test_the_first_host_of_slurms_list():
    lists = ["a", "a,b", "gpu[07-09,12],x", "n[3]", "r1n[2,5]-ib"]
    assert [first_host(hosts) for hosts in lists] == ["a", "a", "gpu07", "n3", "r1n2-ib"]


def test_what_is_not_a_number_is_refused():
    with pytest.raises(ConfigError, match="RANK=x: accepted is a number of 0 or more"):
        guest_rank(TORCH | {"RANK": "x"})


# --- whose failure --------------------------------------------------------------------------------


def left(rank, kind, at, by=None):
    ending = Failed(Failure(kind, f"{kind.value} of {rank}"), caused_by_rank=by)
    return RankEnd(rank, ending=ending, at=at)


OOM, COMM, STOP = FailureKind.DEVICE_OOM, FailureKind.COMM, FailureKind.INTERRUPTED


@pytest.mark.parametrize(
    ("failures", "message", "rank"),
    [
        ([left(1, OOM, 1.0), left(0, COMM, 2.0)], "device_oom of 1", 1),
        ([left(0, COMM, 1.0), left(1, OOM, 2.0)], "device_oom of 1", 1),
        ([left(0, OOM, 1.0, by=2), left(2, OOM, 3.0)], "device_oom of 2", 2),
        ([left(1, OOM, 1.0), left(0, STOP, 2.0)], "device_oom of 1", 1),
        ([left(0, COMM, 1.0), left(2, STOP, 2.0)], "rank 1 was killed", 1),
        ([left(2, STOP, 2.0)], "ranks 0, 1 were killed", None),
        ([], "ranks 0, 1, 2 were killed", None),
        ([left(0, STOP, 1.0), left(1, COMM, 2.0), left(2, COMM, 3.0)], "comm of 1", 1),
        ([left(0, STOP, 1.0), left(1, STOP, 2.0), left(2, STOP, 3.0)], "interrupted of 0", 0),
    ],
)
def test_the_failure_that_others_followed_is_the_cause(failures, message, rank):
    by_rank = {ending.rank: ending for ending in failures}
    cause = find_cause([by_rank.get(rank, RankEnd(rank)) for rank in range(3)])
    assert (cause.message, cause.rank) == (message, rank)
    assert (cause.evidence.clue is Clue.KILLED) == ("killed" in message)


# --- at the same step -----------------------------------------------------------------------------


def test_all_ranks_see_a_flag_together():
    """It does not matter how far each of them is."""
    store, seen = dist.HashStore(), {}

    def loop(rank, pause):
        with StoreVotes(store, rank, 3) as votes:
            for look in range(1, 100_000):
                if votes.read_flag("stop", rank):
                    seen[rank] = look
                    return
                if rank == 1 and look == 20:
                    votes.raise_flag("stop")
                time.sleep(pause)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(loop, range(3), (0.001, 0.002, 0.003)))
    assert len(seen) == 3
    assert len({*seen.values()}) == 1
