"""What features add to the records: where it stands in files, and who may ask for it by name."""

import ast
import json
import pickle
import re
from dataclasses import dataclass, fields

import pytest
from without_feature import PACKAGE, ROOT

from attempts import built
from robust_train.model.attempt import Attempt, Note
from robust_train.model.events import Failed, parse
from robust_train.model.failure import Evidence, Failure, FailureKind
from robust_train.model.parts import Part, parts_like
from robust_train.model.spec import AttemptSpec

RECORD = (ROOT / "tests" / "architecture" / "record.json").read_text()
SPEC = AttemptSpec((), batch_size=8, gradient_accumulation_steps=1)


@dataclass(frozen=True)
class DeletedNote(Note):
    """A note of a feature that has been deleted."""

    figure: int = 3


def test_a_record_in_files_stays_the_same():
    """Its keys, their order, and what stands there if a feature has nothing to say."""
    attempt = Attempt(1, SPEC, failure=Failure(FailureKind.BUG, "m"))
    assert json.dumps(attempt.as_json(), indent=1) + "\n" == RECORD


@pytest.mark.parametrize("part", parts_like(Part))
def test_a_part_stands_behind_a_field(part):
    records = [
        record
        for record in (Attempt, AttemptSpec, Evidence)
        if issubclass(part, record.kind_of_part)
    ]
    names = {field.name for record in records for field in fields(record)}
    assert part.written_after in {"", *names}


def test_a_figure_asked_for_by_name_exists():
    """Without this, a figure that was misspelt would be missing in silence."""
    defaults = {field.name: field.default for part in parts_like(Part) for field in fields(part)}
    sources = [path.read_text() for path in (ROOT / PACKAGE).rglob("*.py")]
    call = re.compile(r"""\.noted\(["'](\w+)["'], (\(\)|[^)]+)\)""")
    calls = [names for text in sources for names in call.findall(text)]
    assert len(calls) == sum(text.count(".noted(") for text in sources)
    for name, otherwise in calls:
        assert defaults[name] == ast.literal_eval(otherwise), name


def test_a_part_of_a_deleted_feature_says_nothing():
    attempt = Attempt(1, SPEC)
    assert attempt.noted("figure", 0) == 0
    assert attempt.of(DeletedNote) == DeletedNote()


def test_what_features_choose_survives_a_file():
    chosen = {"num_workers": 3, "expandable_segments": False, "gradient_checkpointing": True}
    spec = built(AttemptSpec, (), 8, 1, **chosen, splits_loss=True, lr_factor=0.5, skips_to=7)
    assert AttemptSpec.parse(json.loads(json.dumps(spec.as_json()))) == spec


def test_findings_of_features_survive_a_file():
    findings = {"bad_step": 7, "reads_lr": True, "workers": 2, "has_checkpoint": True}
    evidence = built(Evidence, clue="killed", **findings)
    failure = Failure(FailureKind.DIVERGED, "m", evidence)
    parsed = parse(json.loads(json.dumps(Failed(failure).as_json())))
    assert parsed.failure == failure
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_a_program_reads_what_features_know_like_fields():
    evidence = built(Evidence, bad_step=7)
    assert (evidence.bad_step, evidence.good_step, evidence.no_workers) == (7, None, False)
    with pytest.raises(AttributeError, match="Evidence has no 'bad_stop'"):
        _ = evidence.bad_stop


@pytest.mark.parametrize("was_enabled", [False, True])
def test_a_choice_goes_back_to_what_was_asked(was_enabled):
    spec = built(AttemptSpec, (), 8, 1, lr_factor=0.5, gradient_checkpointing=not was_enabled)
    back = spec.with_same(
        "gradient_checkpointing", built(AttemptSpec, (), 8, 1, gradient_checkpointing=was_enabled)
    )
    assert back == built(AttemptSpec, (), 8, 1, lr_factor=0.5, gradient_checkpointing=was_enabled)
