"""A process that an attempt spawns finds what the script defines, as it does without a launcher."""

import os
import subprocess
import sys

import pytest

USES = """
import functools, multiprocessing, pickle, sys
import robust_train

class Rows:
    class Part: pass
    def __init__(self, number): self.number = number
    def doubled(self): return Rows(2 * self.number)

def doubled(rows): return rows.doubled()

def put(queue, rows): queue.put(rows.doubled())

def train(cfg, run=None):
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            doubles = pool.map(doubled, [Rows(1)])
        assert type(doubles[0]) is Rows and doubles[0].number == 2
        queue = context.SimpleQueue()
        child = context.Process(target=put, args=(queue, Rows(3)))
        child.start()
        assert queue.get().number == 6
        child.join()
    with context.Manager() as manager:
        shared = manager.dict(rows=Rows(4))
        assert shared["rows"].number == 4
    # a library that pickles by value what a script defines takes it for a script's
    assert b"__main__" in pickle.dumps(Rows)
    named = train, Rows, Rows.Part, Rows.doubled
    assert {definition.__module__ for definition in named} == {__name__} == {"__main__"}
    print("children found it, by default with", multiprocessing.get_start_method())
"""
GUARDED = 'if __name__ == "__main__":\n    '
SCRIPT = (
    USES
    + GUARDED
    + 'multiprocessing.set_start_method("spawn")\n'
    + '    robust_train.launch(train, {"device": "cpu"})'
)
AS_MODULE = "from .names import NAME\n" + SCRIPT
BY_VALUE = USES + (
    "class Experiment:\n"
    "    def run(self, times, cfg): train(cfg)\n"
    + GUARDED
    + 'robust_train.launch(functools.partial(Experiment().run, 1), {"device": "cpu"})'
)
HYDRA = (
    """
from hydra.core.config_store import ConfigStore
ConfigStore.instance().store(name="mine", node={"x": 0})
"""
    + USES
    + """
@robust_train.hydra_main(version_base="1.3", config_name="mine")
def main(cfg): train(cfg)
"""
)


def run(program, words, cwd, *, code=0):
    path = cwd / "with a space" / "train.py"
    path.parent.mkdir()
    (path.parent / "__init__.py").touch()
    (path.parent / "names.py").write_text(NAMES)
    path.write_text(program)
    ended = subprocess.run(
        [sys.executable, *(str(path) if word == "train.py" else word for word in words)],
        cwd=cwd,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (SCRIPT, ["train.py"]),
        pytest.param(BY_VALUE, ["train.py"], marks=pytest.mark.slow, id="by value"),
        pytest.param(HYDRA + "main()", ["train.py"], marks=pytest.mark.slow, id="no guard"),
        pytest.param(HYDRA + GUARDED + "main()", ["train.py"], marks=pytest.mark.slow, id="hydra"),
        # the folder's name is no identifier, and need not be one
        pytest.param(AS_MODULE, ["-m", "with a space.train"], id="as a module"),
    ],
)
def test_a_spawned_process_finds_what_the_script_defines(program, words, tmp_path):
    said = run(program, words, tmp_path)
    assert "children found it" in said
    # chosen under the guard, which does not run in the attempt
    assert ("by default with spawn" in said) is ("set_start_method" in program)


LOADS = """
import sys
from torch.utils.data import DataLoader, Dataset
from robust_train import launch

class Rows(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return float(index)

def collate(rows): return sum(rows)

def train(cfg):
    for method in ("spawn", "forkserver"):
        loader = DataLoader(
            Rows(), batch_size=4, num_workers=2, collate_fn=collate, multiprocessing_context=method
        )
        print(method, list(loader))

if __name__ == "__main__":
    launch(train, {"device": "cpu"})
"""


@pytest.mark.slow
def test_spawned_data_loader_workers_find_the_data_set(tmp_path):
    said = run(LOADS, ["train.py"], tmp_path)
    assert "spawn [6.0, 22.0]" in said
    assert "forkserver [6.0, 22.0]" in said


HAS_TYPES = """
from dataclasses import dataclass
from omegaconf import OmegaConf
from robust_train import launch

@dataclass
class Options:
    rate: float = 0.5

if __name__ == "__main__":
    options = OmegaConf.structured(Options)
    launch("names.train", OmegaConf.merge({"device": "cpu"}, {"options": options}))
"""
NAMES = """
NAME = 1
def train(cfg): print("rate", cfg.options.rate)
"""


def test_a_config_keeps_the_scripts_types(tmp_path):
    """It does so whichever module trains."""
    assert "rate 0.5" in run(HAS_TYPES, ["train.py"], tmp_path)


UNGUARDED = """
import multiprocessing
from robust_train import launch

def nothing(): pass

def train(cfg):
    child = multiprocessing.get_context("spawn").Process(target=nothing)
    child.start()
    child.join()
    assert child.exitcode == 1

launch(train, {"device": "cpu"})
"""


@pytest.mark.slow
def test_an_unguarded_scripts_child_starts_no_job(tmp_path):
    assert 'put the call under: if __name__ == "__main__":' in run(
        UNGUARDED, ["train.py"], tmp_path
    )


FROM_A_CHILD = """
import multiprocessing
from robust_train import launch

def train(cfg): print("trained by a child's job")

def start(): launch(train, {"device": "cpu"})

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=start)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


def test_a_spawned_process_may_launch_a_job_itself(tmp_path):
    assert "trained by a child's job" in run(FROM_A_CHILD, ["train.py"], tmp_path)
