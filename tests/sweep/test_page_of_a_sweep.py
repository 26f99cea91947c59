"""The page of a sweep whose jobs have ended in every way: what is on it, and its figures."""

import json
import re
from dataclasses import replace

from journals import COMPLETED, STARTED, Journal
from robust_train.folder.state import Summary
from robust_train.model.events import JobEnded, TrainingStarted, ValueReported
from robust_train.sweep.page import read_sweep_story, sweep_page
from robust_train.sweep.record import SweepJob, SweepTable


def charts_of(page):
    scripts = re.findall(r'<script type="application/json">(.*?)</script>', page)
    return [json.loads(data) for data in scripts]


def test_gpu_hours_include_all_launches(tmp_path):
    """What pruning saved is the rest. Two jobs of two hours, one of half an hour pruned, one of
    an hour that failed.
    """
    ends = (("completed", 7200, 0.9), ("completed", 7200, 0.7), ("pruned", 1800, 0.2))
    for number, (status, seconds, value) in enumerate((*ends, ("failed", 3600, 0.1))):
        folder = tmp_path / str(number)
        folder.mkdir()
        overrides = (f"training.lr={number // 2}", f"seed={number % 2}", "model=cnn")
        code = int(status == "failed")
        record = SweepJob(number, overrides, "id", status, code, reason="why")
        replace(record, result=value if status == "completed" else None).write(folder)
        journal = Journal(folder)
        journal(0, STARTED)
        journal.start(1)
        journal(0, TrainingStarted(0), 1)
        journal(seconds / 2, ValueReported(value / 2, 1), 1)
        journal(seconds / 2, ValueReported(value, 2), 1)
        is_done = status != "failed"
        journal.end(1, "completed" if is_done else "bug")
        journal(0, COMPLETED if is_done else JobEnded("failed", "why"))
        attempts = (journal.attempts[1],)
        Summary(status, folder, "why", value, seconds, 0.0, attempts=attempts).write()
    SweepTable("id", "gpu_queue", "ended", 1, 9000.0, repeat=2).write(tmp_path)
    story = read_sweep_story(tmp_path)
    assert [job.row.job for job in story.jobs] == [0, 1, 2, 3]
    assert (
        story.sentence
        == "2 of 4 completed, 1 failed, 1 pruned in 2 h 30 min. The largest result is the best."
    )
    page = sweep_page(story)
    text = "5.5 GPU-hours, 0.5 of them in pruned jobs; pruning saved about 1.5."
    assert text in page
    curves, over_lr, over_seed = charts_of(page)
    assert [(line["name"], line["is_lost"]) for line in curves["lines"]] == [
        ("job 0", False),
        ("job 1", False),
        ("job 2, pruned", True),
        ("job 3", False),
    ]
    for chart in (over_lr, over_seed):
        assert [line["name"] for line in chart["lines"]] == ["pruned", "completed"]
    assert over_lr["lines"][0]["y"] == [0.2], "what a pruned job has reported last"
