"""What memory that runs out, or a process that dies, does to the result: nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded

ROOT = Path(__file__).resolve().parents[2]

# A user's loop. Samples grow longer: from step 40 on, for some steps, all 32 at once are more than
# fits.
GROWING_SAMPLES = """
import json, sys, tempfile
from pathlib import Path

import torch
from torch import nn
from robust_train.attempt.run import Run
from memory_limit import limit_growth

torch.set_num_threads(1)
STEPS, LONG, BATCH, CHANNELS = 60, range(40, 42), 32, 48

def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    length = 4000 if step in LONG else 20 + step
    x = torch.randn(BATCH, length, 8, generator=generator)
    return x, torch.randint(4, (BATCH,), generator=generator)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, CHANNELS), nn.Tanh(), nn.Linear(CHANNELS, CHANNELS), nn.Tanh()
        )
        self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean(dim=1))

def train(events):
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(run_dir=Path(tempfile.mkdtemp()), report=lambda event: events.append(event.as_json()))
    bodies = {}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()

        def loss_of(batch):
            x, y = batch
            bodies.setdefault(step, []).append(len(x))
            return nn.functional.cross_entropy(model(x), y)

        run.backward(loss_of, batch_of(step), model)
        optimizer.step()
        run.progress(step)
    return model, bodies

unlimited, whole = train([])
limit_growth(80 * 2**20)
events = []
model, bodies = train(events)
squares = lambda parameters: sum(float((p.double() ** 2).sum()) for p in parameters)
distance = squares(a - b for a, b in zip(model.parameters(), unlimited.parameters()))
print(json.dumps({
    "relative_distance": (distance / squares(unlimited.parameters())) ** 0.5,
    "changes": [[e["step"], e["before"], e["after"]] for e in events if "after" in e],
    "whole": whole,
    "bodies": bodies,
}))
"""


@pytest.mark.slow
def test_samples_that_outgrow_memory_at_step_40_of_60_cost_one_step_and_change_nothing():
    ended = preloaded.run(GROWING_SAMPLES, cwd=ROOT / "tests")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert all(sizes == [32] for sizes in found["whole"].values())
    assert found["relative_distance"] <= 1e-6
    # the first size of the failed step is repeated with its samples, and no other step is
    assert found["changes"]
    assert {step for step, _, _ in found["changes"]} == {40}
    size = found["changes"][-1][2]
    for step, sizes in found["bodies"].items():
        expected = [32] if int(step) < 40 else [size] * (32 // size)
        assert (sizes if int(step) != 40 else sizes[-len(expected) :]) == expected


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights_bit_for_bit(tmp_path):
    """Four kills here; fifty in benchmarks/kill_and_resume.py."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/kill_and_resume.py"), "--kills=4", "--epochs=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["kills"] == 4
    assert found["bitwise_equal"]
