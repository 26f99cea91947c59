"""Real exhaustion of host memory: torch's CPU allocator under RLIMIT_DATA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_world import write_image_folder

# One attempt in a process of its own. It measures the data segment (what RLIMIT_DATA limits) after
# every layer, which is when activations pile up, and reports the growth since training began.
ATTEMPT = """
import json, logging, resource, sys
from pathlib import Path
import torch
from training_world import WatchedRun, config
from robust_train.training.trainer import train

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
request = json.loads(sys.argv[1])

def data_bytes():
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()

class Run(WatchedRun):
    def memory_milestone(self, name):
        super().memory_milestone(name)
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
    ending["error"] = [type(error).__name__, str(error).splitlines()[0]]
ending |= {
    "growth_bytes": run.most - run.before,
    "checkpoints": [e["path"] for e in run.of("checkpoint")],
    "started_at": [e["step"] for e in run.of("training_started")],
    "milestones": [e["milestone"] for e in run.of("memory")],
}
print(json.dumps(ending))
"""


class Machine:
    """Runs attempts at one job, each with its micro-batch and its memory limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = write_image_folder(folder / "images", per_class=16)

    def attempt(
        self,
        name: str,
        *,
        batch: int,
        accumulation: int,
        growth_bytes: int | None = None,
        resume: str | None = None,
        stop_at_step: int | None = None,
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
        ]
        request = {
            "folder": str(self.folder / name),
            "overrides": overrides,
            "growth_bytes": growth_bytes,
            "resume": resume,
            "stop_at_step": stop_at_step,
        }
        ended = subprocess.run(
            [sys.executable, "-c", ATTEMPT, json.dumps(request)],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("memory"))


def test_after_running_out_of_memory_half_the_batch_goes_on_and_finishes(machine):
    large = machine.attempt("large", batch=16, accumulation=1, stop_at_step=1)
    small = machine.attempt("small", batch=4, accumulation=4, stop_at_step=1)
    assert large["growth_bytes"] > 2 * small["growth_bytes"]
    limit = (large["growth_bytes"] + small["growth_bytes"]) // 2

    checkpoint = small["checkpoints"][-1]
    failed = machine.attempt("job", batch=16, accumulation=1, growth_bytes=limit, resume=checkpoint)
    assert failed["error"][0] in ("RuntimeError", "MemoryError", "OutOfMemoryError")
    assert "memory" in failed["error"][1]
    assert failed["milestones"][-1] == "out of memory"
    assert failed["started_at"] == [1]

    finished = machine.attempt(
        "job", batch=4, accumulation=4, growth_bytes=limit, resume=checkpoint
    )
    assert finished["started_at"] == [1]
    assert finished["result"]["steps"] == 4


def test_validation_needs_no_more_memory_than_training(machine):
    trained = machine.attempt("trained", batch=16, accumulation=1, stop_at_step=1)
    whole = machine.attempt("whole", batch=16, accumulation=1)
    assert whole["result"]["steps"] == 4
    assert whole["growth_bytes"] < 1.5 * trained["growth_bytes"]
