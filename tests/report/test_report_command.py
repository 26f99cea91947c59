"""``robust-train report``, called in this process on run folders that no job has written."""

import json
import logging
import re
import shutil
from dataclasses import replace

import pytest

from journals import HOSTILE, STARTED, Journal, write_failed, write_recovered, write_sweep
from robust_train.cli.main import main
from robust_train.model.events import JobEnded
from robust_train.report.html import write_report
from robust_train.report.sources import read_sources
from robust_train.sweep.record import SweepJob, SweepTable


@pytest.fixture
def run(tmp_path):
    """A run folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_recovered(Journal(folder))
    return folder


def test_the_page_shows_events_and_shortages(run, capsys, monkeypatch):
    """To people and to programs. The command takes a file in the folder too."""
    shown = []
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or True)
    assert main(["report", str(run / "journal.jsonl"), "--open"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert shown == [(run / "report.html").as_uri()]
    page = (run / "report.html").read_text()
    assert "Completed in 35 s at the 2nd attempt, on cuda:0 with micro-batch 32" in page
    assert "2.0 GiB requested, 1.0 GiB of 16.0 GiB free" in page
    assert main(["report", str(run), "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["schema"] == 1
    assert [attempt["outcome"] for attempt in story["attempts"]] == ["device_oom", "completed"]
    parts = {"seconds", "launches", "spans", "memory", "curves", "marks", "advice", "gaps"}
    assert parts <= story.keys()


def test_an_unwritable_report_fails_only_its_command(run, capsys, caplog):
    """It costs a job one warning."""
    (run / "report.html" / "in the way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "robust_train"):
        write_report(read_sources(run))
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"cannot write {run / 'report.html'}: ")
    assert not list(run.glob("*.tmp"))
    assert main(["report", str(run)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_stop_has_one_word_on_the_page(tmp_path):
    """Ctrl-C twice in a job's life does not count as trouble."""
    journal = Journal(tmp_path)
    stop = {"message": "stopped after step 4", "action": "stopped", "reason": "interrupted"}
    for number in (1, 2):
        journal(0, STARTED)
        journal.start(number)
        journal.steps(number, 1, 4)
        journal.end(number, "interrupted", **stop)
        journal(1, JobEnded("interrupted", "interrupted by SIGINT"))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "→ interrupted" not in page
    assert "Interrupted." not in page
    assert page.count("stopped after step 4") == 2
    for cell in page.split('data-label="outcome"')[1:]:
        assert cell.partition("</td>")[0].endswith("stopped")


def test_hostile_texts_stay_texts(tmp_path):
    folder = tmp_path / "<b>run & co"
    folder.mkdir()
    write_failed(Journal(folder))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Failed after" in page
    assert page.count("<script>") == 1, "our own"
    assert "<img" not in page
    assert "&lt;b&gt;run &amp; co" in page
    drawn = re.findall(r'<script type="application/json">(.*?)</script>', page)
    names = [line["name"] for data in drawn for line in json.loads(data)["lines"]]
    assert HOSTILE in names


def test_hostile_texts_of_a_sweep_stay_texts(tmp_path):
    folder = tmp_path / "<b>sweep & co"
    folder.mkdir()
    write_sweep(folder)
    shutil.move(folder / "2", folder / "javascript:alert(1)")
    over = f"model='{HOSTILE}'"
    for number in (0, 1, 2, 3):
        job = next(folder.glob("java*")) if number == 2 else folder / str(number)
        overrides = (f"{over}{number % 2}", f"{HOSTILE}={number}")
        row = SweepJob(number, overrides, "sweep-id", HOSTILE, 1, result=0.5, reason=HOSTILE)
        replace(row, status="completed" if number < 2 else HOSTILE).write(job)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert page.count("<script>") == 1, "our own"
    assert "<img" not in page
    assert "&lt;b&gt;sweep &amp; co" in page
    assert 'href="javascript%3Aalert%281%29/report.html"' in page
    drawn = re.findall(r'<script type="application/json">(.*?)</script>', page)
    captions = re.findall("<h3>(.*?)</h3>", page)
    assert len(drawn) == len(captions)
    assert any("Value over &lt;/script&gt;" in caption for caption in captions)


def test_a_sweeps_page_links_to_all_jobs(tmp_path, capsys):
    write_sweep(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "2 of 3 completed, 1 failed in 40 s" in page
    assert "this learning rate is not for me" in page
    for number in range(3):
        assert f'href="{number}/report.html"' in page
        assert (tmp_path / str(number) / "report.html").exists()
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["row"]["status"] for job in jobs] == ["completed", "completed", "failed"]
    assert [len(job["story"]["attempts"]) for job in jobs] == [2, 2, 1]
    # of one that died, from its jobs
    SweepTable("sweep-id", "basic").write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "The end of the sweep is not recorded" in (tmp_path / "report.html").read_text()
