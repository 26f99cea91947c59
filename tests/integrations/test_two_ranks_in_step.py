"""Two processes in a framework's own trainer: one of them runs out of memory in a step."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from running_out import RUN_OUT, Fuse, differ_by_rounding_alone

import warm


@pytest.mark.proves("Lightning", "several GPUs", "refused", "a collective inside a micro-batch")
@pytest.mark.proves("transformers", "several GPUs", "refused", "a collective inside a micro-batch")
@pytest.mark.proves("Lightning", "several GPUs", "refused", "manual optimization")
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_one_rank_repeats_its_share(tmp_path, framework):
    """Two ranks share the step."""
    folder = Path(__file__).parent
    program = (folder / "group_of_two.py").read_text()
    ended = warm.preloaded(program, framework, str(tmp_path), cwd=folder)
    seen = json.loads(ended.stdout)
    assert all(seen), ended.stderr
    # the framework by itself, whose ranks communicate in the backward pass
    plain = seen[0]["plain"]
    expected = torch.tensor(plain["weights"])
    for (rank, of), at, where in itertools.product(
        enumerate(seen), (3, 4), ("forward", "backward")
    ):
        repeated = of[f"{'first' if at == 3 else 'second'} {where}"]
        differ_by_rounding_alone(torch.tensor(repeated["weights"]), expected)
        assert repeated["logged"] == pytest.approx(plain["logged"], abs=1e-5), (rank, at, where)
        assert repeated["size"] == 2, "all take the size that one has found"
        # batches of earlier steps are not repeated
        # before its first parts each rank checks its split by itself
        if rank:
            checked = Fuse(where, fits=2).of_a_split_check(4)
            sizes = [4] * at + checked + [2] * 2 * 4
        else:
            sizes = [4] * 4 + [4, 2, 2, 1, 3] + [2] * 4
        assert repeated["sizes"] == sizes, (rank, where, at)
    evaluated = seen[1]["evaluation"]
    assert evaluated["sizes"][:3] == [4, 2, 2], "by itself, while the other one waits"
    assert evaluated["logged"] == pytest.approx(plain["logged"], abs=1e-5)
    ran_out, heard = seen[1]["exhausted"]["error"], seen[0]["exhausted"]["error"]
    assert RUN_OUT in ran_out
    assert heard.startswith("RankFailure: rank 1: ")
    assert RUN_OUT in seen[1]["collective"]["error"]
    assert "error" in seen[0]["collective"], "it is left alone, and ends as well"
    assert "calls the collective allreduce_" in ended.stderr
    if framework == "lightning":
        assert all("error" in rank["manual"] and not rank["manual"]["changed"] for rank in seen)
        assert "(automatic_optimization=False)" in ended.stderr
