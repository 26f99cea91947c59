"""The command that goes on with a job."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from robust_train.folder.provenance import this_command


@pytest.mark.parametrize(
    "folder", ["/a/2026-01-31_x.y", "/a b/c", "/a[1]/{x},=y%20 $z", "/ü/(1)", "/it's", '/"a"']
)
def test_the_command_goes_on_in_that_folder_whatever_it_is_called(
    folder: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "lr=1", "hydra.run.dir=/other"])
    *words, last = shlex.split(this_command("hydra.run.dir", Path(folder)))
    assert words == ["python", "train.py", "lr=1"]
    override = OverridesParser.create().parse_override(last)
    value = override.value()
    assert (override.key_or_group, getattr(value, "text", value)) == ("hydra.run.dir", folder)
