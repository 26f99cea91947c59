"""docs/run-folder.md says what the classes say, and what becomes of folders of other versions. Run
this file to write the page's tables anew."""

import dataclasses
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

from robust_train.folder.checkpoints import read_manifests
from robust_train.folder.identity import begin_job, refuse_other_version
from robust_train.folder.state import RunState, Summary, read_state, read_summary
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError
from robust_train.model.events import EVENTS
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.parts import load_parts
from robust_train.model.spec import AttemptSpec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-folder.md"


def events_table():
    """A row for each event."""
    load_parts()  # features declare their events beside their parts
    rows = []
    for name, cls in sorted(EVENTS.items()):
        if cls.is_journaled:
            fields = ", ".join(f"`{item.name}`" for item in dataclasses.fields(cls))
            meaning = " ".join(str(inspect.getdoc(cls)).split("\n\n")[0].split())
            rows.append(f"| `{name}` | {fields} | {_plain(meaning)} |")
    return "\n".join(rows)


def state_table():
    """A row for each field of the state."""
    described = inspect.cleandoc(RunState.__doc__).split("Attributes:\n")[1]
    comment_of = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", described, re.M))
    rows = []
    for item in dataclasses.fields(RunState):
        meaning = " ".join(comment_of[item.name].split())
        if meaning:
            meaning = meaning.rstrip(".") + "."
        rows.append(f"| `{item.name}` | {_plain(meaning)} |")
    return "\n".join(rows)


def _plain(text):
    return re.sub(r":class:`\.?([^`]+)`", r"`\1`", text).replace("``", "`")


def with_tables(page):
    """The page with its tables as they should be."""
    for name, table in (("state", state_table()), ("events", events_table())):
        between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.S)
        page = between.sub(lambda _, table=table: f"{table}\n", page)
    return page


def test_tables_of_state_and_events_match_classes():
    assert PAGE.read_text() == with_tables(PAGE.read_text()), f"run python {Path(__file__).name}"


def test_the_page_has_every_summary_field():
    page = PAGE.read_text().partition("## summary.json")[2]
    record = Attempt(1, AttemptSpec((), 1, 1))
    content = Summary("completed", Path(), attempts=(record,)).as_json()
    for name in (*content, *content["attempts"][0]):
        assert f"`{name}`" in page, name


# --- other versions ---


def test_foreign_summaries_show_at_least_their_result(tmp_path):
    """The summary is of another version."""
    attempt = {"attempt": 1, "device": "cpu", "outcome": "completed", "batch_size": 4}
    earlier = {"schema": 2, "status": "completed", "result": 0.5, "attempts": [attempt]}
    (tmp_path / "summary.json").write_text(json.dumps(earlier))
    summary = read_summary(tmp_path)
    assert (summary.objective, summary.attempts) == (0.5, ())


def test_what_a_newer_version_adds_is_ignored(tmp_path):
    failure = Failure(FailureKind.COMM, "gone")
    content = Summary("failed", attempts=(Attempt(1, AttemptSpec((), 1, 1), failure=failure),))
    written = content.as_json()
    written["attempts"][0] |= {"colour": "red"}
    written["attempts"][0]["failure"] |= {"kind": "gremlins", "depth": 3}
    (tmp_path / "summary.json").write_text(json.dumps(written))
    (attempt,) = read_summary(tmp_path).attempts
    assert (attempt.failure.kind, attempt.failure.message) == (FailureKind.UNKNOWN, "gone")


@pytest.fixture
def foreign(tmp_path):
    """An unfinished job of another version: its trainer failed after the checkpoint of step 2."""
    recorded = Path(__file__).resolve().parents[1] / "recorded" / "run_folder_of_schema_1"
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_another_versions_unfinished_job_is_refused(foreign):
    """Nothing in its folder changes."""
    before = {path: path.read_bytes() for path in foreign.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as refused:
        refuse_other_version(foreign, resume=True)
    (line,) = str(refused.value).splitlines()
    assert "another version of robust-train (state.json has schema 1, this version 2)" in line
    assert "resume=false" in line
    assert {path: path.read_bytes() for path in foreign.rglob("*") if path.is_file()} == before
    assert read_state(foreign) is None
    assert read_summary(foreign).status == "failed"


def test_resume_false_sets_its_checkpoints_aside(foreign):
    """The job begins again."""
    (manifest,) = read_manifests(foreign / "checkpoints")
    saved = manifest.path.read_bytes()
    refuse_other_version(foreign, resume=False)
    beginning = begin_job(foreign, resume=False)
    assert (beginning.checkpoint, beginning.attempts) == (None, 1)
    assert beginning.job != manifest.job
    assert (foreign / "checkpoints" / "earlier-1" / manifest.path.name).read_bytes() == saved


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
