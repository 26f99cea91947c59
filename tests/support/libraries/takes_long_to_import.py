"""A library whose import ends when the test says so."""

import os
import time
from pathlib import Path

Path(os.environ["READY_FILE"]).write_text(str(os.getpid()))
while not Path(os.environ["GO_FILE"]).exists():
    time.sleep(0.01)


def train(cfg):
    return None
