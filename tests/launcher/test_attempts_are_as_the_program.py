"""An attempt is to a script what plain Python is; where it cannot be, a line says so before."""

import ast

import pytest

import warm
from robust_train.config.main_guard import (
    find_effects_lacking_in_module,
    find_effects_lost_by_value,
    find_effects_under_guard,
)

PROGRAM = """
import logging, warnings
from robust_train import launch

RATE = 0.1
log = logging.getLogger("my.project")

def train(cfg):
    assert False, "left out by -O"
    log.info("not set up")
    logging.basicConfig(filename="mine.log", level="DEBUG", format="mine: %(message)s")
    log.debug("rate %s", RATE)
    warnings.warn("an error by -W", RuntimeWarning)

if __name__ == "__main__":
    RATE = 0.2
    launch(train, {"device": "cpu"})
"""


def test_attempts_keep_interpreter_options_and_logging(world):
    """Attempts say which of them they lack."""
    script = world.folder / "train.py"
    script.write_text(PROGRAM)
    command = ["-O", "-W", "error::RuntimeWarning", script]
    ended = world.end(warm.start(command, world.folder, world.environ, alone=True), code=1)
    printed = ended.stdout + ended.stderr
    assert "RuntimeWarning: an error by -W" in printed
    # The job's own format, as long as the program has set up none.
    assert " not set up\n" in ended.stdout
    assert "mine: rate 0.1\n" in (world.folder / "mine.log").read_text()
    before, _, _ = printed.partition("attempt 1 on the CPU")
    assert 'warning: train.py sets RATE under if __name__ == "__main__":' in before


SEEDS = """
import random
from robust_train import launch
{given}
random.seed(3)
if __name__ == "__main__":
    launch({trainer}, {{"device": "cpu"}})
"""
DRAWS = "import random\ndef train(cfg): return random.random()\n"


@pytest.mark.parametrize(
    ("given", "trainer", "why"),
    [
        ("from elsewhere import train", "train", "the trainer is imported from elsewhere"),
        ("", "'elsewhere.train'", "the trainer is imported from elsewhere"),
        ("", "lambda cfg: 1", "the trainer is sent by value"),
        ("from seeding import train", "train", None),
    ],
)
def test_seeds_that_attempts_lack_are_named(world, given, trainer, why):
    """The same numbers in each attempt are what they are set for."""
    (world.folder / "elsewhere.py").write_text(DRAWS)
    (world.folder / "seeding.py").write_text(DRAWS.replace("return", "random.seed(1); return"))
    script = world.folder / "train.py"
    script.write_text(SEEDS.format(given=given, trainer=trainer))
    ended = world.end(warm.start([script], world.folder, world.environ, alone=True), code=0)
    before, _, _ = (ended.stdout + ended.stderr).partition("attempt 1 on the CPU")
    if why is None:
        assert "random.seed" not in before
    else:
        line = (
            f"warning: train.py calls random.seed(), but {why}: train.py does not run in attempts"
        )
        assert line in " ".join(before.split())


BEGINNING = """
import random
import torch
from lightning import seed_everything
RATE = 0.1
OPTIONS = None
class Net:
    width = 4
def set_seed(number):
    random.seed(number)
def read_options():
    global OPTIONS
    OPTIONS = 1
"""


def effects(trainer, guarded, beginning=BEGINNING):
    body = "\n".join(f"    {line}" for line in guarded)
    code = f'{beginning}{trainer}\nif __name__ == "__main__":\n{body}\n'
    under_guard = find_effects_under_guard(ast.parse(code), "train")
    return [*under_guard.calls, *under_guard.names]


@pytest.mark.parametrize(
    ("trainer", "guarded", "lost"),
    [
        ("def train(cfg): print(RATE)", ["RATE = 0.2", "launch(train)"], ["RATE"]),
        ("def train(cfg): Net().fit(cfg)", ["Net.width = 8"], ["Net"]),
        ("def train(cfg): print(OPTIONS)", ["read_options()", "launch(train)"], ["OPTIONS"]),
        ("def train(cfg): print(cfg)", ["set_seed(0)", "launch(train)"], ["random.seed"]),
        ("def train(cfg): print(cfg)", ["torch.manual_seed(0)"], ["torch.manual_seed"]),
        (
            "def train(cfg): print(cfg)",
            ["torch.backends.cudnn.benchmark = True"],
            ["torch.backends.cudnn.benchmark"],
        ),
        # What attempts do as well, or what the trainer does not see, is not lost.
        ("def train(cfg): seed_everything(0)", ["set_seed(0)", "launch(train)"], []),
        ("def train(cfg): RATE = cfg.rate; print(RATE)", ["RATE = 0.2"], []),
        ("def train(cfg): print(cfg)", ["RATE = 0.2", "launch(train, {'rate': RATE})"], []),
        ("def train(cfg): print(NEW)", ["NEW = 0.2", "launch(train)"], []),
        ("def train(cfg): print(RATE)", ["train(None)"], []),
        ("def train(cfg): print(cfg)", ["torch.Generator().manual_seed(0)"], []),
    ],
)
def test_what_only_the_guard_does_is_found(trainer, guarded, lost):
    assert effects(trainer, guarded) == lost


SETS = """
import torch
def main():
    torch.manual_seed(0)
    def train(cfg):
        return cfg
    launch(train)
torch.backends.cudnn.benchmark = True
"""


@pytest.mark.parametrize(
    ("trainer", "called", "lost"),
    [
        ("train", "main()", (["torch.manual_seed"], ["torch.backends.cudnn.benchmark"])),
        ("train", "", ([], ["torch.backends.cudnn.benchmark"])),
        ("<lambda>", "main(lambda cfg: torch.manual_seed(1))", ([], [SETS.split()[-3]])),
        ("partial", "main()", ([], [])),
    ],
)
def test_effects_beside_a_pickled_trainer_are_found(trainer, called, lost):
    lost_effects = find_effects_lost_by_value(ast.parse(SETS + called), trainer)
    assert ([*lost_effects.calls], [*lost_effects.names]) == lost


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        ("def train(cfg): return cfg", ["torch.manual_seed"]),
        ("import tools\ndef train(cfg): tools.set_seed(cfg.seed)", []),
    ],
)
def test_effects_beside_an_imported_trainer_are_found(module, calls):
    lacking = find_effects_lacking_in_module(ast.parse(SETS + "main()"), ast.parse(module))
    assert [*lacking.calls] == calls
