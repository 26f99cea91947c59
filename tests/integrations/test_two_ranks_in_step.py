"""Two processes in a framework's own trainer: one of them runs out of memory in a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import preloaded


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_one_of_two_ranks_repeats_its_share_of_the_step(tmp_path: Path, framework: str):
    folder = Path(__file__).parent
    program = (folder / "group_of_two.py").read_text()
    ended = preloaded.run(program, framework, str(tmp_path), cwd=folder)
    seen = json.loads(ended.stdout)
    assert all(seen), ended.stderr
    # the framework by itself, whose ranks communicate in the backward pass
    plain = seen[0]["plain"]
    for rank, of in enumerate(seen):
        for kind, at in (("first", 3), ("second", 4)):
            assert of[kind]["weights"] == pytest.approx(plain["weights"], abs=1e-5)
            assert of[kind]["logged"] == pytest.approx(plain["logged"], abs=1e-5)
            assert of[kind]["size"] == 2, "all take the size that one has found"
            repeated = at - 2 if kind == "second" else at - 1  # batches of earlier steps
            sizes = [4] * at + [2] * 2 * (6 - repeated) if rank else [4] * 4 + [2] * 4
            assert of[kind]["sizes"] == sizes, (rank, kind)
    error = "OutOfMemoryError: "
    assert all(of["exhausted"]["error"].startswith(error) for of in seen)
    assert "on rank 1" in seen[0]["exhausted"]["error"]
    assert seen[1]["collective"]["error"].startswith(error)
    assert "error" in seen[0]["collective"], "it is left alone, and ends as well"
    assert "calls the collective allreduce_" in ended.stderr
