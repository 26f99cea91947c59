"""The tutorials: their files in an empty folder, their commands run one after the other."""

import re
import shutil

import pytest

from world import ROOT

FILE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.M | re.S)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)

SEEN = {
    "tutorial-script.md": [
        r"completed after .* micro-batch 64",
        r"3 +cpu +16 +64 .*completed",
        "continuing after epoch 1",
        r"runs/long",
    ],
    "tutorial-function.md": [r"completed: 0\.\d\d", "128 → 32 .*completed", "runs/function"],
    "tutorial-sweep.md": [
        "ended with exit code 0",
        r"training\.lr=0\.1 training\.batch_size=\d\d$",
    ],
}


GALLERY = {
    "nanogpt_like": [r"1 +cpu +16 +32 ", r"2 +cpu +8 +32 .*completed", "resuming at iteration 20"],
    "yolo_like": [
        r"1 +cpu +16 +64 ",
        r"2 +cpu +8 +64 .*completed",
        "resuming .*last.pt after epoch 1",
    ],
    "transformers_sonnets": [r"completed after .*result: \d"],
    "lightning_digits": [r"completed after .*result: 0"],
}


def run(world, commands, folder):
    """Run a page's commands in a folder; return what they show."""
    world.environ["ROBUST_TRAIN_STATE_DIR"] = str(world.folder / "state")
    return world.program("bash", "-e", "-c", "\n".join(commands), cwd=folder).stdout


@pytest.mark.slow
@pytest.mark.parametrize("example", GALLERY)
def test_a_gallery_pages_first_command_works(example, world):
    if example.startswith(("transformers", "lightning")):
        pytest.importorskip(example.partition("_")[0], reason="an extra")
    shutil.copytree(ROOT / "examples", world.folder / "examples")
    folder = world.folder / "examples" / example
    first, *_ = COMMANDS.findall((folder / "README.md").read_text())
    shown = run(world, [first], folder)
    for words in GALLERY[example]:
        assert re.search(words, shown), (words, shown)


@pytest.mark.slow
@pytest.mark.parametrize("page", SEEN)
def test_a_tutorial_works_as_it_is_written(page, world):
    text = (ROOT / "docs" / page).read_text()
    for name, content in FILE.findall(text):
        (world.folder / name).write_text(content)
    shown = run(world, COMMANDS.findall(text), world.folder)
    for words in SEEN[page]:
        assert re.search(words, shown, re.M), (words, shown)
