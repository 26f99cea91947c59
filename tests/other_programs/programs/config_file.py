"""Everything in a JSON file; a new folder for each start, the last one looked up by itself."""

import json
import sys
from pathlib import Path

from learning import finish, save, trained

config = json.loads(Path(sys.argv[1]).read_text())
folder = Path("saved", f"start_{len(list(Path('saved').glob('*')))}")
folder.mkdir(parents=True)
resume = sys.argv[2] if sys.argv[2:] else None
for step, weights in trained(resume, config["batch_size"], config["accumulate"]):
    save(folder / f"checkpoint-{step}.json", step, weights)
finish(weights)
