"""The figures of a job that has ended: what they cost when they cannot be had."""

import json

from robust_train import launch
from robust_train.features.report_page import launcher as page
from robust_train.folder.identity import read_identity
from robust_train.folder.state import read_state, read_summary


def test_a_completed_job_stays_completed_without_figures(tmp_path, monkeypatch, caplog):
    def fails(*given):
        raise MemoryError("no room")

    monkeypatch.setattr(page, "goodput_from", fails)
    summary = launch(lambda cfg: 0.5, {"isolation": "none"}, run_dir=tmp_path)
    assert (summary.status, read_summary(tmp_path).result) == ("completed", 0.5)
    assert read_state(tmp_path).state == "completed"
    assert read_identity(tmp_path).completed is not None
    assert "goodput cannot be computed: MemoryError: no room" in caplog.text


def test_a_page_that_fails_costs_nothing_else(tmp_path, monkeypatch, caplog):
    """The failure is named, and what earlier features found is in the summary already."""

    def fails(sources):
        written = json.loads((tmp_path / "summary.json").read_text())
        assert written["environment"] is not None
        raise MemoryError("no room")

    monkeypatch.setattr(page, "write_report", fails)
    launch(lambda cfg: 0.5, {"isolation": "none"}, run_dir=tmp_path)
    assert "the report page cannot be computed: MemoryError: no room" in caplog.text
