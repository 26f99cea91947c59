"""docs/run-folder.md says what the classes say. Run this file to write its tables anew."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path

from robust_train.events import Event
from robust_train.runfolder.state import RunState
from robust_train.runfolder.summary import AttemptRecord, Summary, read_summary
from robust_train.values import Attempt, AttemptSpec, Outcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-folder.md"
_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "tuple[str, ...]": "list of strings",
    "tuple[Speed, ...]": "list of objects",
    "Mapping[str, Json]": "object",
    "Mapping[str, int]": "object of integers",
}


def events_table() -> str:
    """A row for each event."""
    rows = []
    for cls in sorted(Event.__subclasses__(), key=lambda cls: cls.name):
        if cls.name:
            fields = ", ".join(f"`{item.name}`" for item in dataclasses.fields(cls))
            meaning = " ".join(str(inspect.getdoc(cls)).split("\n\n")[0].split())
            rows.append(f"| `{cls.name}` | {fields} | {_plain(meaning)} |")
    return "\n".join(rows)


def state_table() -> str:
    """A row for each field of the state."""
    comments = re.findall(
        r"((?:^    # .*\n)*)^    (\w+): [^#\n]*(?:# (.*))?$", inspect.getsource(RunState), re.M
    )
    told = {
        name: (above.replace("    # ", "") + beside).strip() for above, name, beside in comments
    }
    rows = []
    for item in dataclasses.fields(RunState):
        kind = _TYPES[str(item.type).removesuffix(" | None")]
        meaning = " ".join(told[item.name].split())
        meaning += "." * bool(meaning)
        rows.append(f"| `{item.name}` | {kind} | {_plain(meaning)} |")
    return "\n".join(rows)


def _plain(text: str) -> str:
    return re.sub(r":class:`\.?([^`]+)`", r"`\1`", text).replace("``", "`")


def with_tables(page: str) -> str:
    """The page with its tables as they should be."""
    for name, table in (("state", state_table()), ("events", events_table())):
        between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.S)
        page = between.sub(lambda _, table=table: f"{table}\n", page)
    return page


def test_the_tables_of_state_and_events_are_those_of_the_classes():
    assert PAGE.read_text() == with_tables(PAGE.read_text()), f"run python {Path(__file__).name}"


def test_every_field_of_the_summary_is_on_the_page():
    page = PAGE.read_text().partition("## summary.json")[2]
    record = AttemptRecord(Attempt(AttemptSpec((), 1, 1), Outcome(None)))
    content = Summary("completed", Path(), attempts=(record,)).as_json()
    for name in (*content, *content["attempts"][0]):
        assert f"`{name}`" in page, name


def test_attempts_are_numbered_from_1_through_all_launches(tmp_path: Path):
    record = AttemptRecord(Attempt(AttemptSpec((), 1, 1), Outcome(None)))
    second_launch = Summary("completed", tmp_path, attempts=(record, record), first_attempt=2)
    assert [one["attempt"] for one in second_launch.as_json()["attempts"]] == [2, 3]


def test_a_summary_of_schema_1_can_still_be_read(tmp_path: Path):
    attempt = {"index": 0, "device": "cpu", "outcome": "completed", "batch_size": 4}
    earlier = {"schema": 1, "status": "completed", "result": 0.5, "attempts": [attempt]}
    (tmp_path / "summary.json").write_text(json.dumps(earlier))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert (summary.objective, summary.attempts[0].batch_size) == (0.5, 4)
    assert summary.attempts[0].attempt is None, "not number 0"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
