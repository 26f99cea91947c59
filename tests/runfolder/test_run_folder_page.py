"""docs/run-folder.md says what the classes say. Run this file to write its tables anew."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path

from robust_train.folder.state import RunState, Summary, read_summary
from robust_train.model.attempt import Attempt
from robust_train.model.events import EVENTS
from robust_train.model.failure import Failure, FailureKind
from robust_train.model.spec import AttemptSpec

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
    "Attempt": "object",
}


def events_table() -> str:
    """A row for each event."""
    rows = []
    for name, cls in sorted(EVENTS.items()):
        if cls.is_journaled:
            fields = ", ".join(f"`{item.name}`" for item in dataclasses.fields(cls))
            meaning = " ".join(str(inspect.getdoc(cls)).split("\n\n")[0].split())
            rows.append(f"| `{name}` | {fields} | {_plain(meaning)} |")
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
    record = Attempt(1, AttemptSpec((), 1, 1))
    content = Summary("completed", Path(), attempts=(record,)).as_json()
    for name in (*content, *content["attempts"][0]):
        assert f"`{name}`" in page, name


def test_a_summary_of_another_version_has_at_least_its_result(tmp_path: Path):
    attempt = {"attempt": 1, "device": "cpu", "outcome": "completed", "batch_size": 4}
    earlier = {"schema": 2, "status": "completed", "result": 0.5, "attempts": [attempt]}
    (tmp_path / "summary.json").write_text(json.dumps(earlier))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert (summary.objective, summary.attempts) == (0.5, ())


def test_what_a_newer_version_adds_is_ignored(tmp_path: Path):
    failure = Failure(FailureKind.COMM, "gone")
    content = Summary("failed", attempts=(Attempt(1, AttemptSpec((), 1, 1), failure=failure),))
    written = content.as_json()
    written["attempts"][0] |= {"colour": "red"}
    written["attempts"][0]["failure"] |= {"kind": "gremlins", "depth": 3}
    (tmp_path / "summary.json").write_text(json.dumps(written))
    (attempt,) = read_summary(tmp_path).attempts
    assert (attempt.failure.kind, attempt.failure.message) == (FailureKind.UNKNOWN, "gone")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
