"""In accelerate's manner: a folder for each checkpoint, whose files are written in place one after
the other; memory runs out, or a kill comes, in between."""

import argparse
import json
from pathlib import Path

from learning import STEPS, finish, happens, one_step

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--resume", type=Path)
options = parser.parse_args()
first, weights = 0, [0.0, 0.0]
if options.resume:
    weights = json.loads((options.resume / "model.json").read_text())
    first = json.loads((options.resume / "optimizer_0.json").read_text())["step"]
for step in range(first + 1, STEPS + 1):
    weights = one_step(weights, step, options.batch_size, options.accumulate)
    if step % options.every == 0:
        folder = Path(f"out/step_{step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.json").write_text(json.dumps(weights))
        happens(step, options.batch_size)
        (folder / "optimizer_0.json").write_text(json.dumps({"step": step}))
finish(weights)
