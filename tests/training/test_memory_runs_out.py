"""Real exhaustion of host memory: torch's CPU allocator under RLIMIT_DATA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_world import difference, write_image_folder

import preloaded

# the same with the whole command is in launcher/test_built_in_jobs.py
pytestmark = pytest.mark.slow

# One attempt in a process of its own. It measures the data segment (what RLIMIT_DATA limits) after
# every layer, which is when activations pile up, and reports the growth since training began.
ATTEMPT = """
import json, logging, resource, sys, traceback
from pathlib import Path
import torch
from training_world import WatchedRun, config
from training_world import train

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
request = json.loads(sys.argv[1])

def data_bytes():
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()

class Run(WatchedRun):
    def record_memory(self, name):
        super().record_memory(name)
        if name == "optimizer created":
            # threads and libraries that training needs are there before the limit is
            torch.nn.functional.conv2d(torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3))
            self.before = self.most = data_bytes()
            torch.nn.modules.module.register_module_forward_hook(self.measure)
            if request["growth_bytes"] is not None:
                limit = self.before + request["growth_bytes"]
                resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))

    def measure(self, *ignored):
        self.most = max(self.most, data_bytes())

resume = request["resume"]
run = Run(
    Path(request["folder"]),
    resume=None if resume is None else Path(resume),
    stop_at_step=request["stop_at_step"],
)
ending = {}
try:
    ending["result"] = train(config(*request["overrides"]), run)
except BaseException as error:
    ending["error"] = [type(error).__name__, (str(error) or "no memory").splitlines()[0]]
    traceback.print_exc()
ending |= {
    "growth_bytes": run.most - run.before,
    "checkpoints": [e["path"] for e in run.of("checkpoint")],
    "started_at": [e["step"] for e in run.of("training_started")],
    "milestones": [e["milestone"] for e in run.of("memory")],
    "micro_batches": run.of("micro_batch_changed"),
    "exhausted": run.of("micro_batch_exhausted"),
}
print(json.dumps(ending))
"""


class Machine:
    """Runs attempts at one job, each with its micro-batch and its memory limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = write_image_folder(folder / "images", per_class=18)

    def attempt(
        self,
        name: str,
        *,
        batch: int,
        accumulation: int,
        growth_bytes: int | None = None,
        resume: str | None = None,
        stop_at_step: int | None = None,
        least: int = 1,
    ) -> dict[str, Any]:
        overrides = [
            "dataset=image_folder",
            f"dataset.root={self.images}",
            "model.image_size=128",
            "model.width=16",
            "training.num_workers=0",
            "training.epochs=2",
            f"training.batch_size={batch}",
            f"training.gradient_accumulation_steps={accumulation}",
            f"+min_batch_size={least}",
        ]
        request = {
            "folder": str(self.folder / name),
            "overrides": overrides,
            "growth_bytes": growth_bytes,
            "resume": resume,
            "stop_at_step": stop_at_step,
        }
        ended = preloaded.run(ATTEMPT, json.dumps(request), cwd=Path(__file__).parent)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def large(machine: Machine) -> dict[str, Any]:
    """One step with all 16 samples at once."""
    return machine.attempt("large", batch=16, accumulation=1, stop_at_step=1)


@pytest.fixture(scope="module")
def whole(machine: Machine) -> dict[str, Any]:
    """The job with all the memory that it wants."""
    return machine.attempt("whole", batch=16, accumulation=1)


@pytest.fixture(scope="module")
def limit(large: dict[str, Any]) -> int:
    """Too little for a micro-batch of 16; one of 4 needs about a quarter of what that does."""
    return large["growth_bytes"] * 3 // 4


def test_a_step_that_runs_out_of_memory_is_repeated_with_smaller_parts(machine, limit, whole):
    ended = machine.attempt("job", batch=16, accumulation=1, growth_bytes=limit)
    assert ended["result"]["steps"] == 4
    assert ended["started_at"] == [0]
    changes = ended["micro_batches"]
    assert [(c["before"], c["after"]) for c in changes] in ([(16, 8)], [(16, 8), (8, 4)])
    assert changes[0]["step"] == 1
    assert changes[-1]["last_micro_batch"] == changes[-1]["after"] < 16
    assert changes[0]["kind"] == "host_oom"
    weights, expected = (torch.load(e["result"]["checkpoint"])["model"] for e in (ended, whole))
    # dropout draws for each part anew, so this is the same training but not the same numbers
    assert difference(weights, expected) < 0.1


@pytest.mark.slow
def test_where_no_smaller_part_is_allowed_the_attempt_fails_and_the_next_one_goes_on(
    machine, limit
):
    checkpoint = machine.attempt("small", batch=4, accumulation=4, stop_at_step=1)["checkpoints"]
    failed = machine.attempt(
        "next", batch=16, accumulation=1, growth_bytes=limit, resume=checkpoint[-1], least=16
    )
    assert failed["error"][0] in ("RuntimeError", "MemoryError", "OutOfMemoryError")
    assert failed["exhausted"][0]["kind"] == "host_oom"
    assert failed["started_at"] == [1]
    assert failed["exhausted"][0]["tried"] == [16]

    # the step that failed was taken back and saved: nothing before it is repeated
    assert len(failed["checkpoints"]) == 1
    finished = machine.attempt(
        "next",
        batch=4,
        accumulation=4,
        growth_bytes=limit,
        resume=failed["checkpoints"][-1],
        least=4,
    )
    assert finished["started_at"] == [1]
    assert finished["result"]["steps"] == 4


def test_validation_needs_no_more_memory_than_training(large, whole):
    assert whole["result"]["steps"] == 4
    assert whole["growth_bytes"] < 1.5 * large["growth_bytes"]
