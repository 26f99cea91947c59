"""What a live run can be asked, carried out in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from robust_train.memory.reports import perform
from simulated_nvml import MIB

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/memory/test_memory_on_a_gpu.py has CUDA's"
)


def asked(verb: str, folder: Path, **options):
    answer = perform(verb, options, folder)
    # it goes over a socket
    assert json.loads(json.dumps(answer)) == answer
    assert {"before", "after", "sentence"} <= answer.keys()
    assert "\n" not in answer["sentence"]
    return answer


def test_snapshots_are_numbered_and_say_what_they_hold(tmp_path: Path) -> None:
    outputs = torch.ones(8 * MIB)
    first = asked("memory_snapshot", tmp_path)
    second = asked("memory_snapshot", tmp_path)
    assert first["written"] == [str(tmp_path / "memory-tensors-1.json")]
    assert second["written"] == [str(tmp_path / "memory-tensors-2.json")]
    assert "no CUDA in this process, so there is no snapshot" in first["sentence"]
    tensors = json.loads((tmp_path / "memory-tensors-1.json").read_text())
    assert tensors[0]["shape"] == [8 * MIB]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "memory-tensors-1.json",
        "memory-tensors-2.json",
    ]
    assert len(outputs)


@pytest.mark.parametrize(
    ("verb", "options", "line"),
    [
        ("memory_info", {"loud": 1}, "memory_info has no option loud: it has none"),
        ("memory_clear", {"forced": True}, "memory_clear has no option forced: accepted is force"),
        ("memory_eat", {}, "no such request: memory_eat; accepted are memory_info, "),
        ("memory_clear", {"force": "yes"}, "force='yes': accepted is true or false"),
        ("memory_fraction", {}, "the option fraction is missing"),
        ("memory_fraction", {"fraction": 2}, "fraction=2: accepted is a number over 0, up to 1"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(tmp_path: Path, verb, options, line) -> None:
    with pytest.raises(ValueError, match="^" + line.replace("(", r"\(")) as refused:
        perform(verb, options, tmp_path)
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_written_is_the_system_s_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        perform("memory_snapshot", {}, tmp_path / "missing")
