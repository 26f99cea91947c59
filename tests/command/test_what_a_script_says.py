"""The pure parts: messages, placeholders, checkpoints on disk, last words."""

import glob
import json
import os
import re
import resource
import struct
import tempfile
import tracemalloc
import zipfile
from decimal import Decimal
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from robust_train.attempt.run import Run, live_of
from robust_train.attempt.script.checkpoint_watch import NOTHING, CheckpointWatch, find_stamps
from robust_train.attempt.script.messages import LineReader, NotUnderstoodError, Result, parse
from robust_train.attempt.script.rendezvous import rendezvous_environment
from robust_train.attempt.script.script_run import ScriptRun, line_writer
from robust_train.config.placeholders import ScriptValues, decimal, literal, placeholders_in
from robust_train.config.schema import RobustConfig
from robust_train.folder.checkpoint_files import is_whole
from robust_train.host.linux import release_blocks
from robust_train.launcher.script_output import classify_script_exit, quote_output_end
from robust_train.model.events import (
    CheckpointSaved,
    Progress,
    ScriptEnded,
    TrainingStarted,
    UserEvent,
    ValueReported,
)
from robust_train.model.exit import Exit
from robust_train.model.failure import FailureKind

VALUES = ScriptValues(
    batch_size=16,
    gradient_accumulation_steps=4,
    effective_batch_size=128,
    learning_rate="0.1",
    num_gpus=2,
    min_batch_size=2,
    num_workers=0,
    device="cuda:0",
    attempt=3,
    checkpoint="/c k/last.pt",
    run_dir="/run",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = ("progress", "started", "checkpoint", "result", "micro_batch_changed", "mine")
KEYS = ("step", "path", "value", "kind", "before", "after", "total_steps", "attempt")
EVENTS, FIELDS = st.sampled_from(NAMES), st.dictionaries(st.sampled_from(KEYS), JSON)


LINES = st.builds(lambda event, fields: json.dumps({"event": event, **fields}), EVENTS, FIELDS)


@given(st.one_of(st.text(), JSON.map(json.dumps), LINES))
@settings(max_examples=200)
@example("[" * 20_000)
def test_any_line_is_read_or_refused(line):
    """What is read is what the launcher understands."""
    try:
        message = parse(line)
    except NotUnderstoodError:
        return
    event = json.loads(line)["event"]
    assert isinstance(event, str)
    match message:
        case Progress() | TrainingStarted():
            assert message.step >= 0
        case CheckpointSaved():
            assert message.path
        case UserEvent():
            assert message.event_name == event
            assert not {"attempt", "time", "event"} & set(message.fields)


@pytest.mark.parametrize("name", ["attempt_started", "finished", "self"])
def test_custom_events_may_have_any_name(name):
    """These are the script's own events."""
    assert parse(json.dumps({"event": name, "a": 1, "time": 2})) == UserEvent(name, {"a": 1})


@given(st.floats(min_value=0, max_value=1e9) | st.integers(0, 10**9))
@example(5e-05)
@example(0.1 * 3)
def test_every_reader_of_a_number_reads_the_same(number):
    text = decimal(number)
    assert re.fullmatch(r"\d+(\.\d+)?", text), "bc knows no exponent"
    read = {float(text), json.loads(text), yaml.safe_load(text), float(Decimal(text))}
    assert len(read) == 1
    assert read.pop() == pytest.approx(number, rel=1e-14, abs=0)


@pytest.mark.parametrize(
    ("number", "text"), [(5e-05, "0.00005"), (0.1 * 3, "0.3"), (1.0, "1"), (1 / 3, repr(1 / 3))]
)
def test_a_number_is_written_as_people_write_it(number, text):
    assert decimal(number) == text


@pytest.mark.parametrize(
    ("command", "environ", "is_set"),
    [
        ("torchrun --nproc-per-node 2 train.py --master-of-arts 1", {}, True),
        ("python -m torch.distributed.run train.py", {"MASTER": "me"}, True),
        ("torchrun --nnodes=1 train.py", {}, True),
        ("torchrun --nnodes 1:1 train.py", {}, True),
        ("torchrun --nnodes 1:4 train.py", {}, False),
        ("torchrun --nnodes=2 train.py", {}, False),
        ("torchrun --standalone train.py", {}, False),
        ("torchrun --rdzv_endpoint=host:1 train.py", {}, False),
        ("torchrun --master-port 29501 train.py", {}, False),
        ("accelerate launch --main_process_port 0 train.py", {}, False),
        ("bash -c MASTER_PORT=29501 torchrun train.py", {}, False),
        ("torchrun train.py", {"MASTER_PORT": "29501"}, False),
        ("torchrun train.py", {"PET_RDZV_ENDPOINT": "host:1"}, False),
        ("torchrun train.py", {"PET_NPROC_PER_NODE": "2"}, True),
        ("bash train.sh", {}, False),
    ],
)
def test_torchrun_chooses_a_free_port_by_default(command, environ, is_set):
    """A given address is used instead."""
    variables = rendezvous_environment(command.split(), environ, 1)
    assert variables == ({"PET_STANDALONE": "1"} if is_set else {})
    variables = rendezvous_environment(["bash", "train.sh"], environ, 2)
    assert bool(variables) == (environ.keys() <= {"MASTER", "PET_NPROC_PER_NODE"})


def test_objectives_are_reported_by_named_figures_too(tmp_path):
    """What a sweep optimises, also by the figures that ``objective`` names."""
    assert parse('{"event": "report", "value": 0.5, "step": 3}') == ValueReported(0.5, 3)
    with pytest.raises(NotUnderstoodError, match="report: ValueReported needs value"):
        parse('{"event": "report", "step": 3}')
    reported = []
    run = Run(run_dir=tmp_path, report=reported.append)
    live_of(run).configure(RobustConfig(objective="accuracy"))
    run.progress(4)
    run.epoch_ended(1, accuracy=torch.tensor(0.25), loss=1.0)
    run.record("metrics", {"step": 5, "accuracy": 0.5})
    run.record("metrics", {"step": 6, "loss": 0.5})
    run.report(0.75)
    values = [event for event in reported if isinstance(event, ValueReported)]
    assert values == [ValueReported(0.25, 1), ValueReported(0.5, 5), ValueReported(0.75, 4)]


def test_a_figure_may_have_any_name(tmp_path):
    reported = []
    parsed = parse('{"event": "progress", "step": 1, "self": 2, "name": 3, "note": "x"}')
    assert isinstance(parsed, Progress)
    Run(run_dir=tmp_path, report=reported.append).progress(parsed.step, **parsed.metrics)
    assert reported == [Progress(1, None, {"self": 2, "name": 3})]


@given(st.lists(st.integers(1, 7)))
def test_lines_come_whole_however_they_are_written(cuts):
    data = b'{"a": 1}\n{"b": 2}\n\n{"c": 3}'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        reader, lines = LineReader(path), []
        assert list(reader.read()) == []
        with path.open("ab", buffering=0) as file:
            for cut in [*cuts, len(data)]:
                file.write(data[:cut])
                data = data[cut:]
                lines += reader.read()
        lines += reader.read(to_the_end=True)
    assert lines == ['{"a": 1}', '{"b": 2}', '{"c": 3}']


def test_bursts_and_endless_lines_cost_no_memory(tmp_path):
    path = tmp_path / "events"
    path.write_bytes(b"x" * 20_000_000 + b"\n" + b'{"event": "mine"}\n' * 200_000)
    tracemalloc.start()
    try:
        lines = LineReader(path).read()
        with pytest.raises(NotUnderstoodError, match="longer than 50000 characters"):
            parse(next(lines))
        assert parse(next(lines)) == UserEvent("mine")
        assert sum(1 for _ in lines) == 199_999
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


def test_read_reports_take_no_disk_space(tmp_path):
    """No report is lost."""
    path = tmp_path / "events"
    reader, lines = LineReader(path, block_bytes=64 * 1024), []
    with path.open("ab", buffering=0) as file:
        for number in range(40):
            for part in range(100):
                file.write(b'{"event": "step %d.%d", "text": "%s"}\n' % (number, part, b"x" * 700))
            lines += [json.loads(line)["event"] for line in reader.read()]
    lines += [json.loads(line)["event"] for line in reader.read(to_the_end=True)]
    assert lines == [f"step {number}.{part}" for number in range(40) for part in range(100)]
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * 100_000)
    blocks = probe.stat().st_blocks
    release_blocks(probe, 0, 100_000)
    if probe.stat().st_blocks == blocks:
        pytest.skip("this disk cannot release a part of a file")
    assert path.stat().st_blocks * 512 < 400_000 < path.stat().st_size


def test_a_torn_report_does_not_spoil_another(tmp_path):
    """A full disk cut it short; the next is a line of its own."""
    path = tmp_path / "events"
    report = line_writer(path)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        report({"event": "note", "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert path.stat().st_size == 20
    report({"event": "result", "value": 3})
    *_, last = LineReader(path).read()
    assert parse(last) == Result(3)


def test_placeholders_are_filled_in_and_other_braces_stay():
    text = 'x={batch_size} {"lr": 1} ${HOME} {other} {checkpoint} {$}{batch_size}'
    assert VALUES.fill(text) == 'x=16 {"lr": 1} ${HOME} {other} /c k/last.pt $16'


@given(st.text(st.sampled_from("${}\\'ab _")))
@example("$${HOME}")
def test_a_literal_comes_back_as_it_was(text):
    if "{$}" not in text:
        assert "${" not in literal(text)
        assert VALUES.fill(literal(text)) == text


def test_the_environment_has_every_placeholder():
    environ = VALUES.environment()
    assert environ["ROBUST_TRAIN_BATCH_SIZE"] == "16"
    assert environ["ROBUST_TRAIN_CHECKPOINT"] == "/c k/last.pt"
    text = " ".join("{" + name.removeprefix("ROBUST_TRAIN_").lower() + "}" for name in environ)
    assert len(placeholders_in(text)) == len(environ)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_truncated_zip_is_not_whole(content, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("data", content)
        assert is_whole(path)
        size = path.stat().st_size
        os.truncate(path, data.draw(st.integers(0, size - 22)))  # 22: the record at its end
        assert not is_whole(path) or path.stat().st_size < 4


def test_a_whole_safetensors_file_has_its_length(tmp_path):
    """A folder is whole if all files in it are."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"12345678")
    assert is_whole(path)
    for size in (path.stat().st_size - 1, 12, 4):
        os.truncate(path, size)
        assert not is_whole(path), f"cut to {size} bytes"

    inner = tmp_path / "checkpoint-5" / "inner"
    inner.mkdir(parents=True)
    assert not is_whole(inner.parent)
    (inner / "config.json").write_text("{}")
    assert is_whole(inner.parent)
    (inner.parent / "weights.bin").write_bytes(b"PK\x03\x04 torn")
    assert not is_whole(inner.parent)


def test_only_new_files_at_rest_are_found(tmp_path):
    pattern = str(tmp_path / "*.ckpt*")
    old, new = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    old.write_text("old")
    watch = CheckpointWatch(pattern, find_stamps(pattern))

    def newest(*, at_rest):
        return watch.newest(at_rest=at_rest).path

    assert watch.newest(at_rest=True) == NOTHING
    new.write_text("half")
    (tmp_path / "3.ckpt.tmp").write_text("unfinished by its name")
    assert newest(at_rest=False) == NOTHING.path, "seen only once"
    new.write_text("half and more")
    assert newest(at_rest=False) == NOTHING.path, "changed since"
    assert newest(at_rest=False) == new
    old.write_text("written again")
    os.utime(old, ns=(0, new.stat().st_mtime_ns + 1))
    assert newest(at_rest=True) == old
    old.write_bytes(b"")
    assert newest(at_rest=True) == new


SLURM = "slurmstepd: error: Detected 1 oom_kill event"


@pytest.mark.parametrize(
    ("returncode", "tail", "oom_killed", "kind", "message"),
    [
        (3, "", False, FailureKind.BUG, "exit code 3"),
        (-11, "", False, FailureKind.BUG, "SIGSEGV"),
        (137, "", False, FailureKind.INTERRUPTED, "SIGKILL"),
        (-15, "", False, FailureKind.INTERRUPTED, "SIGTERM"),
        (137, SLURM, False, FailureKind.HOST_OOM, "oom"),
        # a kill that the kernel counted counts only after SIGKILL
        (137, "", True, FailureKind.HOST_OOM, "OOM killer"),
        (1, "", True, FailureKind.BUG, "exit code 1"),
    ],
)
def test_without_a_word_the_exit_status_tells_why(returncode, tail, oom_killed, kind, message):
    failure = classify_script_exit(
        ScriptEnded(returncode, 5), Exit(output=tail, oom_killed=oom_killed)
    )
    assert failure.kind is kind
    assert message in failure.message


def test_last_words_are_the_last_visible_traceback():
    """They are what a terminal would show of it."""
    tail = "10%\r50%\r100%\nTraceback (most recent call last):\n  a\n\x1b[31mValueError\x1b[0m: b\n"
    text = quote_output_end(tail, "attempt-1.log")
    assert text.splitlines()[1:] == ["Traceback (most recent call last):", "  a", "ValueError: b"]
    assert quote_output_end("1%\r2%\n", "x").splitlines()[1:] == ["2%"]
    assert "nothing" in quote_output_end("", "x")


def test_the_last_of_many_quick_reports_is_kept():
    lines = []
    run = ScriptRun({}, lines.append)
    for step in range(1, 4):
        run.progress(step, loss=1 / step)
    live_of(run).reports.send_last_progress()
    live_of(run).reports.send_last_progress()
    assert [line["step"] for line in lines] == [1, 3]


@pytest.mark.parametrize(
    ("cut", "said"),
    [(0, "is empty and is not used"), (60, "is cut off and is not used"), (None, "")],
)
def test_a_matching_incomplete_checkpoint_is_called_incomplete(tmp_path, cut, said):
    path = tmp_path / "last.pt"
    watch = CheckpointWatch(str(path), {})
    assert watch.explain_unused(NOTHING) is None
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("weights", bytes(1000))
    whole = watch.newest(at_rest=True)
    assert whole.path == path
    if cut is not None:
        path.write_bytes(path.read_bytes()[:cut])
        os.utime(path, ns=(whole.changed + 1,) * 2)
    unused = watch.explain_unused(whole)
    assert unused is None if cut is None else unused.text == f"checkpoint {path} {said}"
    assert cut is None or unused.path == str(path)


def test_brackets_in_checkpoint_names_are_pointed_out(tmp_path):
    (tmp_path / "[exp]").mkdir()
    (tmp_path / "[exp]" / "1.pt").write_text("weights")
    pattern = f"{glob.escape(str(tmp_path))}/[exp]/*.pt"
    said = CheckpointWatch(pattern, {}).explain_unused(NOTHING).text
    assert said.endswith(f"write [[] for a bracket in a name: {tmp_path}/[[]exp]/*.pt")
    assert CheckpointWatch(f"{tmp_path}/[[]exp]/*.pt", {}).explain_unused(NOTHING) is None
    assert CheckpointWatch(f"{tmp_path}/[abc]/*.pt", {}).explain_unused(NOTHING) is None
