"""accelerate, Lightning and transformers in several processes that share optimizer steps."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import preloaded

PROGRAM = Path(__file__).with_name("ranks_of_frameworks.py")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["accelerate", "lightning", "transformers"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the framework's ranks have seen in each of several splits of the same steps."""
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the extra [{name}] is not installed")
    folder = tmp_path_factory.mktemp(name)
    ended = preloaded.run(PROGRAM.read_text(), name, str(folder), cwd=PROGRAM.parent)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert all(all(ranks) for ranks in told.values()), ended.stderr
    return name, told


def samples(ranks: list[dict[str, Any]]) -> dict[int, set[float]]:
    """The samples of each step, of all ranks."""
    steps = defaultdict(set)
    for rank in ranks:
        for step, sample in rank["seen"]:
            steps[step].add(round(sample, 6))
    return steps


def test_every_split_of_a_step_has_its_samples_and_gives_its_gradient(seen: Any):
    name, told = seen
    for how, ranks in told.items():
        alone = told["one sample left" if "left" in how else "alone"]
        assert len({tuple(rank["weights"]) for rank in ranks}) == 1, how
        expected = samples(alone)
        # it fills an epoch's last step up with the epoch's first samples
        fills_up = name == "transformers" and len(ranks) > 1
        for step, found in samples(ranks).items():
            if fills_up and step % 3 == 2:
                assert found > expected[step], how
            else:
                assert found == expected[step], how
        if not fills_up:
            assert ranks[0]["weights"] == pytest.approx(alone[0]["weights"], abs=1e-6), how


def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(seen: Any):
    _, told = seen
    first = min(int(step) for step in told["two ranks in parts"][0]["saved"])
    for how in ("two ranks in parts, then four", "and one"):
        assert sorted(samples(told[how])) == list(range(first, 6))
