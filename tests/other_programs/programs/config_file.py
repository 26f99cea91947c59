"""Everything in a JSON file; a new folder for each start, the last one looked up by itself."""

import json
import sys
from pathlib import Path

from learning import STEPS, finish, happens, load, one_step, save

config = json.loads(Path(sys.argv[1]).read_text())
folder = Path("saved", f"start_{len(list(Path('saved').glob('*')))}")
folder.mkdir(parents=True)
first, weights = load(sys.argv[2] if sys.argv[2:] else None)
for step in range(first + 1, STEPS + 1):
    happens(step, config["batch_size"])
    weights = one_step(weights, step, config["batch_size"], config["accumulate"])
    save(folder / f"checkpoint-{step}.json", step, weights)
finish(weights)
