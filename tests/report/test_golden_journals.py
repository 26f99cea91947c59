"""The stories of journals that real runs have left: see ``tests/golden/make.py``."""

import json
import re
from pathlib import Path

import pytest

from golden.told import told
from robust_train.report.html import job_page
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.page import read_sweep_story, sweep_page

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(journal.parent for journal in GOLDEN.rglob("journal.jsonl"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(GOLDEN)))
def test_a_recorded_run_is_told_as_expected(folder):
    story = story_of(read_sources(folder))
    expected = json.loads((folder / "expected.json").read_text())
    assert json.loads(json.dumps(told(story))) == expected
    parts = [story.seconds[use] for use in ("useful", "lost", "wait", "startup")]
    assert sum(parts) == pytest.approx(story.seconds["wall"])
    assert sum(story.parts.values()) == pytest.approx(story.seconds["wall"])
    page = job_page(story)
    drawn = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert len(drawn) == len(expected["charts"])
    for data, chart in zip(map(json.loads, drawn), expected["charts"], strict=True):
        assert [line["name"] for line in data["lines"]] == chart["lines"]
        assert all(len(line["x"]) == len(line["y"]) for line in data["lines"])


def test_a_recorded_sweeps_page_shows_each_loss():
    """Each job has its own."""
    sweep = read_sweep_story(GOLDEN / "sweep")
    assert sweep.sentence.startswith("2 of 2 completed in ")
    page = sweep_page(sweep)
    assert re.search(r"\d s on the CPU\.", page)
    *over, loss = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert [line["name"] for line in json.loads(loss)["lines"]] == ["job 0", "job 1"]
    for chart in map(json.loads, over):
        assert (chart["x"], [line["name"] for line in chart["lines"]]) == ("figure", ["completed"])
