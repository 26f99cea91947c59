"""A Python script that uses ``robust_train.current_run``."""

import os
import sys
import time
from pathlib import Path

import robust_train

run = robust_train.current_run()
if "until-stopped" in sys.argv:
    Path(sys.argv[1]).write_text(str(os.getpid()))
    while not run.should_stop():
        time.sleep(0.01)
    path = run.run_dir / "mine.txt"
    path.write_text("saved")
    run.checkpoint_saved(path, 7)
    sys.exit(0)
run.started(0)
for step in (1, 2):
    run.progress(step)
run.progress(3, loss=0.5)
has_torch = "torch" in sys.modules
run.result({"objective": 0.5, "batch": run.batch_size, "device": run.device, "torch": has_torch})
