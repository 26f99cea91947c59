"""What is read from a trainer's source before anything of it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from robust_train.errors import ConfigError
from robust_train.execution.library_imports import find_trainer, libraries_of
from robust_train.execution.trainer_ref import TrainerRef


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the Python path whose modules end the process if they are imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "import os; os._exit(1)"]))


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as refused:
        libraries_of(TrainerRef(path))
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


def test_libraries_are_found_through_the_users_own_modules(project: Path):
    write(project / "one" / "__init__.py", "import numpy")
    write(
        project / "one" / "trainer.py",
        "from __future__ import annotations",
        "import json, sys",
        "from typing import TYPE_CHECKING",
        "import torch.nn as nn",
        "from . import parts",
        "from .parts import helper",
        "import two.deep",
        "if TYPE_CHECKING:",
        "    import hydra",
        "try:",
        "    import psutil, not_there",
        "except ImportError:",
        "    import rich",
        "def train(cfg):",
        "    import tenacity",
        "    if cfg.wanted:",
        "        import yaml",
        "def another(cfg):",
        "    import jinja2",
    )
    write(project / "one" / "parts.py", "from torch import optim", "def helper(): ...")
    write(project / "two" / "deep.py", "import one.trainer", "import omegaconf")
    found = libraries_of(TrainerRef("one.trainer.train"))
    assert found == ("numpy", "torch.nn", "torch", "torch.optim", "omegaconf", "psutil", "tenacity")
    assert "one" not in sys.modules


def test_a_list_of_more_modules_is_read_from_the_module(project: Path):
    write(project / "listing.py", "preload_modules = ['PIL.Image']", "def train(cfg): ...")
    assert libraries_of(TrainerRef("listing.train")) == ("PIL.Image",)


@pytest.mark.parametrize(
    ("line", "heeds"),
    [
        ("def train(cfg): cfg.training.gradient_checkpointing", True),
        ("def train(cfg): cfg['training']['gradient_checkpointing']", True),
        ("from reading import train", True),
        ("def train(cfg): model.gradient_checkpointing_enable()", False),
        ("def train(cfg): cfg.training.gradient_checkpointing_kwargs", False),
    ],
)
def test_a_trainer_heeds_gradient_checkpointing_if_its_source_reads_the_key(
    project: Path, line: str, heeds: bool
):
    write(project / "reading.py", "def train(cfg): cfg.training.gradient_checkpointing")
    write(project / "trains.py", line)
    assert find_trainer("trains.train", inline=False)[2] is heeds


def test_a_trainer_on_our_transformers_integration_heeds_it(project: Path):
    ours = "from robust_train.integrations.transformers import fit"
    write(project / "fits.py", ours, "def train(cfg, run): ...")
    assert find_trainer("fits.train", inline=False)[2]


def test_a_trainer_without_libraries_has_none(project: Path):
    write(project / "plain.py", "import json", "def train(cfg): ...")
    assert libraries_of(TrainerRef("plain.train")) == ()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["def trian(cfg): ..."], ["has no 'train'", "did you mean 'trian'?"]),
        (["def train(cfg:"], ["SyntaxError", "line 1", "job.py"]),
        (
            ["import math", "import no_such_package"],
            ["No module named 'no_such_package'", "line 2"],
        ),
    ],
)
def test_a_mistake_is_refused_in_one_line(project: Path, lines: list[str], words: list[str]):
    (project / "job.py").write_text("\n".join(lines))
    message = refusal("job.train")
    assert all(word in message for word in ["trainer._target_=job.train", *words]), message


def test_a_module_that_does_not_exist_is_refused(project: Path):
    assert "no module 'nowhere' on the Python path" in refusal("nowhere.train")


@pytest.mark.parametrize(
    "line",
    [
        "from anything import *",
        "def __getattr__(name): ...",
        "globals()['train'] = print",
        "import sys; sys.path.append('x'); import set_up_by_hand; train = set_up_by_hand",
        "class Trainer: ...; train = Trainer()",
    ],
)
def test_what_cannot_be_read_is_left_to_the_attempt(project: Path, line: str):
    (project / "anything.py").write_text("")
    write(project / "job.py", *line.split("; "))
    libraries_of(TrainerRef("job.train"))
