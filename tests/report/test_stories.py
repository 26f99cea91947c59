"""What a report tells, from journals and samples of every kind."""

import dataclasses
import json
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from journals import COMPLETED, STARTED, Journal, write_recovered
from robust_train.folder.memory_samples import Sample, encode
from robust_train.model.attempt import Attempt, AttemptEnded
from robust_train.model.events import (
    EVENTS,
    AttemptStarted,
    CheckpointSaved,
    DecidedAgain,
    DeviceAcquired,
    Event,
    MicroBatchChanged,
    Progress,
    SpeedMeasured,
    TrainingStarted,
    UpdateSkipped,
    UserEvent,
    parse,
)
from robust_train.model.failure import FailureKind
from robust_train.model.spec import AttemptSpec, Speed
from robust_train.readable import GIB, MIB
from robust_train.report.charts import curve_charts, memory_charts
from robust_train.report.facts import speed_of
from robust_train.report.html import job_page
from robust_train.report.sources import read_sources
from robust_train.report.story import goodput_from, story_of


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path)


@pytest.fixture
def begun(journal):
    """An attempt on a GPU has begun."""
    journal(0, STARTED)
    journal.start(1)
    return journal


def write_samples(journal, samples, torn=""):
    text = "".join(encode(sample) + "\n" for sample in samples)
    (journal.folder / "memory.jsonl").write_text(text + torn)


def test_a_killed_attempts_speed_is_shown_too(begun):
    """The page has the speed of each rank."""
    fast = Speed(400, 0.1, 0.2, 640.0, data_share=0.05)
    for rank, share in ((0, 0.01), (1, 0.3), (0, 0.05)):
        begun(1, SpeedMeasured(replace(fast, rank=rank, data_share=share), rank), 1)
    (attempt,) = begun.story.attempts
    assert speed_of(attempt) == (fast, replace(fast, rank=1, data_share=0.3))
    page = job_page(begun.story)
    assert "<h2>Speed</h2>" in page
    assert "30 %" in page
    assert "Rank 1 waited for data 30 % of the time" in page
    assert '"speed": [{"steps": 400' in json.dumps(begun.story.as_json())


def test_a_report_is_titled_by_the_job(journal):
    """It also says which command was run."""
    named = {"name": "lora_flowers102", "model": "lora", "command": "python train_robust.py"}
    for model in ("cnn", "lora"):  # the last launch counts
        journal(0, replace(STARTED, about=named | {"model": model}))
    environment = {"git_commit": "0123456789abcdef", "git_dirty": True, "torch": "2.15"}
    environment |= {"cuda": "13.2", "driver": "580.1", "gpus": [{"name": "NVIDIA <b>H200</b>"}]}
    (journal.folder / "environment.json").write_text(json.dumps(environment))
    about = journal.story.about
    assert (about["git commit"], about["git dirty"]) == ("0123456789abcdef", "True")
    assert (about["torch"], about["cuda"], about["driver"]) == ("2.15", "13.2", "580.1")
    page = job_page(journal.story)
    assert "<h1>lora_flowers102" in page
    for words in ("trainers.train", "<dd>lora</dd>", "train_robust.py", "NVIDIA &lt;b&gt;H200"):
        assert words in page
    for content in ("[1]", "{", '{"gpus": 1, "git_commit": []}', '{"gpus": [1, {"name": 3}]}'):
        (journal.folder / "environment.json").write_text(content)
        assert job_page(journal.story), content


def test_nothing_is_advised_where_nothing_was_tight(begun):
    begun.end(1, seconds=1)
    begun(0, COMPLETED)
    assert begun.story.advice == ()
    assert begun.story.seconds["useful"] == 1, "a trainer that reports no steps trains all along"


def test_goodput_says_what_the_time_went_into(journal):
    journal(0, STARTED)
    journal(10, DeviceAcquired("cuda:0", wait_seconds=10))
    journal.start(1)
    journal(3, TrainingStarted(0), 1)
    journal.steps(1, 1, 20)
    journal(0, UpdateSkipped(20, 1), 1)
    journal(0, SpeedMeasured(Speed(20, 1.0, 1.0)), 1)
    journal(0, CheckpointSaved("/twenty", 20, saving_seconds=2.5), 1)
    journal.steps(1, 21, 24)
    journal(50, parse({"event": "stalled", "seconds": 50.0}), 1)
    journal.end(1, "unknown", action="retry")
    journal.at += 5
    journal.start(2)
    journal(2, TrainingStarted(20), 2)
    journal.steps(2, 21, 30)
    journal.end(2)
    journal(1, COMPLETED)
    seconds = {"waiting": 15, "starting": 6, "saving": 2.5, "skipped": 1, "stalled": 50}
    assert journal.story.parts == seconds | {"useful": 26.5, "repeated": 4}
    goodput = goodput_from(read_sources(journal.folder))
    assert goodput is not None
    assert goodput["share"] == round(26.5 / 105, 3)


def test_one_value_is_a_dot(journal):
    """One sample makes no chart."""
    journal(0, STARTED)
    journal.start(1, device="cpu")
    journal(1, Progress(1, metrics={"accuracy": 0.5}), 1)
    write_samples(journal, [Sample(journal.at, 1, "cpu", 1, resident=MIB)])
    journal.end(1, seconds=1, peak_memory_bytes=3 * MIB)
    (chart,) = [*curve_charts(journal.story), *memory_charts(journal.story)]
    assert (chart.plot.lines[0].x, chart.plot.lines[0].y) == ([1], [0.5])


def test_the_peaks_of_a_report_agree(journal):
    journal(0, STARTED)
    journal.start(1, device="cpu")
    write_samples(journal, [Sample(journal.at + i, 1, "cpu", i, resident=5 * MIB) for i in (0, 1)])
    journal.end(1, seconds=1, peak_memory_bytes=9 * MIB)
    story = journal.story
    assert story.peak_memory_bytes == story.attempts[0].peak_memory_bytes == 9 * MIB
    assert "at most 9.0 MiB" in memory_charts(story)[0].legend[0][1]


def test_trainer_events_are_marked_by_their_names(begun):
    begun(1, UserEvent("job_ended", {"status": "failed", "time": "<now>"}), 1)
    begun(1, Progress(1, metrics={"attempt": 7.0, "step": 2.0}), 1)
    story = begun.story
    assert story.status == "unfinished"
    assert [mark.text for mark in story.marks] == ["job_ended: status=failed, time=<now>"]
    assert {curve.name: curve.points for curve in story.curves} == {
        "attempt": ((1, 7.0),),
        "step": ((1, 2.0),),
    }


def test_a_later_attempt_can_undo_an_earlier_one(journal):
    """It starts further back: the checkpoint of step 5 turns out to be damaged, and the third
    attempt starts at step 2.
    """
    recovered = write_recovered(journal)
    text = (recovered.folder / "journal.jsonl").read_text()
    lines = [line for line in text.splitlines() if "ended" not in line]
    (recovered.folder / "journal.jsonl").write_text("\n".join(lines) + "\n")
    recovered.start(3, size=16)
    recovered(0, TrainingStarted(2), 3)
    recovered.steps(3, 3, 4)
    recovered.end(3, end_step=4)
    story = recovered.story
    useful = {s.attempt: s.seconds for s in story.spans if s.use == "useful"}
    assert useful == pytest.approx({1: 2, 3: 2})


def test_a_clock_set_back_reverses_no_story(journal):
    """The records of attempts have the time as it was set."""
    journal(0, STARTED)
    journal.start(1)
    journal.steps(1, 1, 5)
    journal.end(1, "device_oom")
    journal.at -= 1000
    journal.start(2, size=32)
    journal.end(2)
    journal(1005, COMPLETED)
    story = journal.story
    assert [attempt.number for attempt in story.attempts] == [1, 2]
    assert story.sentence.startswith("Completed in 10 s at the 2nd attempt, on cuda:0 with micro-")
    assert story.seconds["lost"] == 5


def test_memory_is_drawn_by_device(journal):
    """A torn sample is left out."""
    journal(0, STARTED)
    journal.start(1, device="cuda:1")
    journal.start(2, device="cpu")
    gpu = [Sample(journal.at + i, 1, "cuda:1", i, allocated=GIB) for i in range(2)]
    cpu = [Sample(journal.at + i, 2, "cpu", i, resident=GIB + i) for i in range(3)]
    write_samples(journal, [*gpu, *cpu], torn='{"time": 1, "attempt"')
    story = journal.story
    assert [(m.device, len(m.samples)) for m in story.memory] == [("cuda:1", 2), ("cpu", 3)]
    assert story.spans[-1].end == cpu[-1].time, "the last sample is a sign of life"
    page = job_page(story)
    assert "Memory on cuda:1" in page
    assert "at most 1.0 GiB" in page


def test_a_nearly_full_gpu_has_its_figures(begun):
    write_samples(begun, [Sample(begun.at, 1, "cuda:0", 1, 11 * GIB, 12 * GIB, 23 * GIB, 24 * GIB)])
    begun.end(1, seconds=1)
    begun(0, COMPLETED)
    (advice,) = begun.story.advice
    assert advice.finding == (
        "cuda:0 was 96 % full at its fullest (23.0 GiB of 24.0 GiB), "
        "up to 11.0 GiB of it outside of this job's cache."
    )


def test_a_folder_without_journal_has_a_report(tmp_path):
    assert "no record" in job_page(story_of(read_sources(tmp_path)))
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    story = story_of(read_sources(tmp_path))
    assert story.status == "completed"
    assert "only summary.json is left" in story.sentence


def test_a_line_separator_does_not_tear_lines(begun):
    """A torn line is counted."""
    begun.end(1, "bug", message="one\u2028two")
    text = (begun.folder / "journal.jsonl").read_text()
    raw = text.replace("\\u2028", "\u2028")
    (begun.folder / "journal.jsonl").write_text(raw)
    assert begun.story.attempts[0].message == "one\u2028two"
    assert begun.story.gaps == ()
    (begun.folder / "journal.jsonl").write_text(raw + '{"time": 179526')
    assert "1 line damaged or of an unknown kind" in job_page(begun.story)


SPEC = AttemptSpec((), 4, 2)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
KEYS = [field.name for kind in EVENTS.values() for field in dataclasses.fields(kind)]
NAMES = [kind.name for kind in EVENTS.values()]
valid_events = st.sampled_from(
    [
        STARTED,
        COMPLETED,
        TrainingStarted(2),
        CheckpointSaved("/two", 2),
        AttemptEnded(Attempt(1, SPEC, seconds=2.0)),
        AttemptStarted(SPEC),
        DeviceAcquired("cpu", wait_seconds=3),
        UserEvent("mine"),
        MicroBatchChanged(1, True, 4, "oom", FailureKind.DEVICE_OOM, after=2),
        Progress(3),
        Progress(4, metrics={"loss": 0.5}),
        DecidedAgain("lost_race", "p", "halve_batch", "r"),
    ]
).map(Event.as_json)


def spoiled(event, name, time, field, attempt):
    """Return a valid event with another name, if one is given, another time and more fields."""
    return event | field | attempt | {"event": name or event["event"], "time": time}


hostile_events = st.lists(
    st.builds(
        spoiled,
        valid_events,
        st.none() | st.sampled_from(NAMES) | anything,
        st.floats(0, 2e9) | anything,
        st.dictionaries(st.sampled_from(KEYS), st.integers(0, 9) | anything, max_size=1),
        st.fixed_dictionaries({}, optional={"attempt": st.integers(1, 3)}),
    ),
    max_size=25,
)


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(hostile_events, st.lists(anything, max_size=4))
@example(  # a launch that took no time, then another one
    events=[{**STARTED.as_json(), "time": time} for time in (0.0, 1.0)]
    + [{**COMPLETED.as_json(), "time": 2.0}],
    others=[],
)
def test_every_run_folder_has_a_report(tmp_path, events, others):
    """The contents of the folder do not matter."""
    lines = "".join(json.dumps(event) + "\n" for event in [*events, *others])
    (tmp_path / "journal.jsonl").write_text(lines)
    samples = [{**event, "device": "cpu", "resident": 5} for event in events]
    (tmp_path / "memory.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    story = story_of(read_sources(tmp_path))
    job_page(story)
    json.dumps(story.as_json(), allow_nan=False)
    for span, following in zip(story.spans, story.spans[1:], strict=False):
        assert span.end <= following.start
    away = story.seconds.get("stopped", 0.0)
    if story.spans:
        length = story.spans[-1].end - story.spans[0].start
        assert math.isclose(story.seconds["wall"] + away, length, abs_tol=1e-3)
