"""How much to reserve, for which jobs, and where that is kept."""

import concurrent.futures
import json
import os
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.config.schema import RobustConfig
from robust_train.features.measured_memory.launcher import MeasuredMemory, Measurement
from robust_train.features.measured_memory.model import (
    FIRST_STEPS,
    PEAK,
    QUIET_SECONDS,
    Sample,
    fingerprint,
    is_measured,
    largest_fitting,
    peak_at,
    peak_by_torch,
    program_of,
    took_all_at_once,
    with_margin,
    words_that_matter,
)
from robust_train.features.measured_memory.store import (
    MOST_JOBS,
    MOST_SIZES,
    Need,
    read_needs,
    remember,
)
from robust_train.host.linux import lock
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec
from robust_train.readable import GIB, MIB

SIZES = st.integers(1, 4096)
BYTES = st.integers(1, 1 << 40)


@settings(max_examples=40, deadline=None)
@given(BYTES, st.integers(0, 1 << 40))
def test_a_reservation_covers_peak_and_holdings(peak, held):
    reserved = with_margin(peak, held)
    assert reserved >= max(1.1 * peak, held) - 1
    assert reserved <= max(1.1 * peak + 1, held)


@settings(max_examples=40, deadline=None)
@given(BYTES, st.integers(0, 1 << 30), st.sets(SIZES, min_size=2, max_size=6), SIZES)
def test_affine_memory_is_interpolated_exactly(weights, per_sample, sizes, size):
    """Up to one byte of rounding."""
    peaks = {measured: weights + per_sample * measured for measured in sizes}
    assert abs(peak_at(peaks, size) - (weights + per_sample * size)) <= 1


@settings(max_examples=40, deadline=None)
@given(BYTES, SIZES, SIZES)
def test_one_peak_answers_for_smaller_sizes_only(peak, measured, size):
    expected = peak if size <= measured else None
    assert peak_at({measured: peak}, size) == expected


@settings(max_examples=40, deadline=None)
@given(BYTES, st.integers(1, 1 << 30), st.sets(SIZES, min_size=2, max_size=4), BYTES)
def test_the_largest_fitting_size_fits(weights, per_sample, sizes, room):
    peaks = {measured: weights + per_sample * measured for measured in sizes}
    fits = largest_fitting(peaks, room)
    if fits:
        assert with_margin(peak_at(peaks, fits)) <= room
    if fits < 1 << 19:
        assert with_margin(peak_at(peaks, fits + 1)) > room


def test_a_size_is_unknown_without_measurements():
    assert peak_at({}, 8) is None
    assert largest_fitting({}, GIB) is None


KEYS = {"seed": 1, "model": {"name": "vit", "width": 64}, "optim": {"lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize(
    "other",
    [
        {**KEYS, "seed": 2},
        {**KEYS, "run_name": "third"},
        {**KEYS, "optim": {"lr": 0.2, "momentum": 0.9}},
        {**KEYS, "output_dir": "/elsewhere"},
    ],
)
def test_seeds_names_and_rates_change_no_job(other):
    assert fingerprint("train.py", KEYS) == fingerprint("train.py", other)


@pytest.mark.parametrize(
    "other",
    [
        {**KEYS, "model": {"name": "resnet", "width": 64}},
        {**KEYS, "model": {"name": "vit", "width": 128}},
        {**KEYS, "optim": {"lr": 0.1, "momentum": 0.0}},
    ],
)
def test_other_models_are_other_jobs(other):
    assert fingerprint("train.py", KEYS) != fingerprint("train.py", other)


def test_versions_and_programs_are_other_jobs():
    assert fingerprint("a.py", KEYS) != fingerprint("b.py", KEYS)
    assert fingerprint("a.py", KEYS, ["2.4"]) != fingerprint("a.py", KEYS, ["2.5"])


def test_a_command_line_loses_what_does_not_matter():
    argv = "python t.py --seed 3 --width 64 --lr=0.1 model.lr=1 run_name=x --fast --name -v"
    assert words_that_matter(argv.split()) == ["python", "t.py", "--width", "64", "--fast", "-v"]


def test_a_script_is_known_from_any_folder(tmp_path):
    from_here = program_of(["python", "train.py"], str(tmp_path))
    assert from_here == ["python", os.path.realpath(tmp_path / "train.py")]


def test_ten_steps_and_a_checkpoint_are_a_measurement():
    assert not is_measured(FIRST_STEPS - 1, saved=True, quiet_seconds=1e6)
    assert not is_measured(1000, saved=False, quiet_seconds=1e6)
    assert is_measured(FIRST_STEPS, saved=True, quiet_seconds=0)
    assert not is_measured(None, saved=True, quiet_seconds=QUIET_SECONDS / 2)
    assert is_measured(None, saved=False, quiet_seconds=QUIET_SECONDS)


def test_torch_counts_a_peak_between_samples():
    figures = {"reserved": 2 * GIB, "max_allocated": 3 * GIB, "context_bytes": 500 * MIB}
    assert peak_by_torch(figures) == 3 * GIB + 500 * MIB
    assert peak_by_torch({"reserved": 2 * GIB}) == 0, "the context is unknown"
    assert peak_by_torch({"max_resident": GIB}) == 0
    config = RobustConfig(gpu_jobs_per_device=2)
    feature = MeasuredMemory(SimpleNamespace(plan=SimpleNamespace(config=config)))
    feature.current = Measurement(1, ("A", "B"), {}, peaks={"A": GIB, "B": 2 * GIB})
    attempt = Attempt(1, AttemptSpec((), 8, 1), memory=figures)
    assert feature.evidence(attempt, [attempt]).memory[PEAK] == 3 * GIB + 500 * MIB


def test_a_program_that_takes_all_is_recognised():
    assert took_all_at_once([500 * MIB, 31 * GIB], 40 * GIB, has_allocator=False)
    assert not took_all_at_once([500 * MIB, 31 * GIB], 40 * GIB, has_allocator=True)
    rising = [4 * GIB * number for number in range(1, 9)]
    assert not took_all_at_once(rising, 40 * GIB, has_allocator=False)
    first_step = [500 * MIB, 13 * GIB, 37 * GIB]
    assert not took_all_at_once(first_step, 40 * GIB, has_allocator=False)


def test_a_measurement_is_kept_and_found(tmp_path):
    path = tmp_path / "state" / "needs.json"
    remember("job", "A100", 8, 5 * GIB, path)
    remember("job", "A100", 16, 9 * GIB, path)
    remember("job", "H100", 16, 10 * GIB, path)
    need = read_needs(path)["job"]
    assert need.on(["A100"]) == {8: 5 * GIB, 16: 9 * GIB}
    assert need.on(["A100", "H100"]) == {8: 5 * GIB, 16: 10 * GIB}
    assert need.on(["L4"]) == need.on() == need.on(["A100", "H100"])
    assert path.parent.stat().st_mode & 0o077 == 0


def test_the_file_stays_small(tmp_path):
    path = tmp_path / "needs.json"
    old = {"seen": 1.0, "peaks": {"A100": {"8": GIB}}}
    now = time.time()
    young = {f"job {n}": {**old, "seen": now - 1000 + n} for n in range(MOST_JOBS)}
    path.write_text(json.dumps({"version": 1, "jobs": {"old": old, **young}}))
    remember("newest", "A100", 8, GIB, path)
    needs = read_needs(path)
    assert len(needs) == MOST_JOBS
    assert needs.keys().isdisjoint({"old", "job 0"})
    assert {"newest", f"job {MOST_JOBS - 1}"} <= needs.keys()


def test_a_user_without_a_home_keeps_nothing(tmp_path, monkeypatch):
    """Least of all in a folder of the name ~ in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    remember("job", "A100", 8, GIB)
    assert read_needs() == {}
    assert os.listdir() == []


def test_the_newest_sizes_are_kept():
    need = Need()
    for size in range(1, MOST_SIZES + 4):
        need = need.with_peak("A100", size, GIB, 1.0)
    assert sorted(need.on(["A100"])) == list(range(4, MOST_SIZES + 4))


def test_a_partial_run_replaces_no_larger_peak(tmp_path):
    """A run that resumes at its end, or has begun, has not allocated what the whole run does."""
    path = tmp_path / "needs.json"
    remember("job", "A100", 8, 5 * GIB, path)
    remember("job", "A100", 8, GIB, path, is_whole=False)
    assert read_needs(path)["job"].on(["A100"]) == {8: 5 * GIB}
    remember("job", "A100", 8, 2 * GIB, path)
    assert read_needs(path)["job"].on(["A100"]) == {8: 2 * GIB}


@pytest.mark.parametrize(
    "content",
    [
        '{"version": 1, "jo',
        "[]",
        '{"version": 2, "jobs": {}}',
        '{"version": 1, "jobs": []}',
        '{"version": 1, "jobs": {"a": {"seen": 1, "peaks": {"A100": {"8": -4}}}}}',
        '{"version": 1, "jobs": {"a": {"seen": 1, "peaks": {"A100": {"x": 4}}}}}',
        '{"version": 1, "jobs": {"a": {}}}',
    ],
)
def test_a_torn_file_is_ignored_in_one_line(tmp_path, caplog, content):
    path = tmp_path / "needs.json"
    path.write_text(content)
    assert read_needs(path) == {}
    assert len(caplog.messages) == 1
    assert str(path) in caplog.text
    remember("job", "A100", 8, GIB, path)
    assert read_needs(path)["job"].on(["A100"]) == {8: GIB}
    assert len(caplog.messages) == 1


def test_measurements_at_once_are_all_kept(tmp_path):
    """Reading, changing and writing back is behind a lock, so no writer undoes another."""
    path = tmp_path / "needs.json"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: remember(f"job {n}", "A100", 8, GIB, path), range(24)))
    assert len(read_needs(path)) == 24


def test_a_lock_that_is_held_costs_one_measurement(tmp_path):
    path = tmp_path / "needs.json"
    remember("first", "A100", 8, GIB, path)
    with path.with_suffix(".lock").open("r+b") as held:
        assert lock(held.fileno())
        remember("second", "A100", 8, GIB, path)
    remember("third", "A100", 8, GIB, path)
    assert read_needs(path).keys() == {"first", "third"}


HELD = 2 * GIB


@pytest.mark.parametrize(
    ("sample", "by_process", "by_difference"),
    [
        (Sample(3 * GIB, GIB, (GIB, GIB)), HELD, HELD),
        (Sample(3 * GIB, GIB, (GIB, None)), None, HELD),
        (Sample(3 * GIB, GIB, is_listed=False), None, HELD),
        (Sample(3 * GIB, GIB, (None,), others=1), None, None),
        (Sample(3 * GIB, GIB, (None,), is_alone=False), None, None),
        (Sample(GIB, 3 * GIB, is_listed=False), None, 0),
    ],
)
def test_the_difference_counts_only_while_alone(sample, by_process, by_difference):
    assert sample.by_process() == by_process
    assert sample.by_difference() == by_difference


def test_a_job_without_cuda_holds_nothing():
    assert Sample(GIB, GIB).is_before_cuda
    assert Sample(3 * GIB, GIB, others=1).is_before_cuda
    assert not Sample(3 * GIB, GIB).is_before_cuda, "WSL2 lists no processes"
    assert not Sample(3 * GIB, GIB, is_listed=False).is_before_cuda


def test_memory_of_others_is_told_apart():
    assert Sample(6 * GIB, GIB, (2 * GIB,), others=1).taken_by_others() == 3 * GIB
    assert Sample(3 * GIB, GIB, (2 * GIB,)).taken_by_others() == 0
    assert Sample(6 * GIB, GIB, (None,)).taken_by_others() == 0
