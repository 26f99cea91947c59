"""The tutorials: their files in an empty folder, their commands run one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from world import ROOT, World

FILE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.M | re.S)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)

SEEN = {
    "tutorial-script.md": [
        r"1 +cpu +64 .*completed",
        r"3 +cpu +16 +64 .*completed",
        "going on after epoch 1",
        r"runs/long",
    ],
    "tutorial-function.md": [r"completed: 0\.\d\d", "128.*64.*32", "runs/function"],
    "tutorial-sweep.md": [r"4 jobs|completed", r"^0\.1 0\.\d+ .*sweeps/first/\d$"],
}


@pytest.mark.slow
@pytest.mark.parametrize("page", SEEN)
def test_a_tutorial_works_as_it_is_written(page: str, world: World):
    text = (ROOT / "docs" / page).read_text()
    for name, content in FILE.findall(text):
        (world.folder / name).write_text(content)
    world.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{world.environ['PATH']}"
    world.environ["ROBUST_TRAIN_STATE_DIR"] = str(world.folder / "state")

    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(COMMANDS.findall(text))],
        cwd=world.folder,
        env=world.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for words in SEEN[page]:
        assert re.search(words, done.stdout, re.M), (words, done.stdout)
