"""What earlier jobs have taught about memory: kept in small files, and used with care."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.batch.job_sizes import BatchSizes
from robust_train.batch.known import (
    VALID_SECONDS,
    Fact,
    Known,
    KnownBatches,
    cache_directory,
    memory_key,
)
from robust_train.config.batch import memory_settings, settle
from robust_train.config.schema import complete
from robust_train.events import BatchSizeFound, Event, KnownBatchUsed, MicroBatchChanged
from robust_train.policy.decide import first_attempt
from robust_train.settings import batch_settings, policy_settings
from robust_train.values import GIB, Failure, FailureKind, GpuInfo, Group, Outcome, Speed

GPU = GpuInfo("GPU-1", "NVIDIA H200", 0, "0:1", 140 * GIB, 139 * GIB, GIB)
COMPLETED = Outcome(None, end_step=30, peak_memory_bytes=GIB)
RAN_OUT = Outcome(Failure(FailureKind.DEVICE_OOM, "CUDA out of memory"))


class Job:
    """The sizes of one job, whose attempts are described rather than run."""

    def __init__(
        self, found: dict[str, int] | None = None, requested: int | None = None, **cfg: object
    ) -> None:
        self.cfg = complete(cfg)
        is_auto = settle(self.cfg)
        self.settings = policy_settings(self.cfg, finds_batch_size=is_auto)
        self.said: list[Event] = []
        batch = batch_settings(self.cfg, "my.trainer")
        about = (found or {}, self.said.append, requested)
        self.sizes = BatchSizes(batch, self.settings, *about)

    def begin(self, *gpus: GpuInfo):
        return self.begin_on(gpus or (GPU,))

    def begin_on(self, gpus: Group):
        self.spec, self.search = self.sizes.begin(first_attempt(self.settings, gpus))
        return self.spec.batch_size, self.spec.gradient_accumulation_steps

    def end(self, outcome: Outcome, size: int | None = None):
        if size is not None:
            self.spec = replace(self.spec, batch_size=size)
        return self.sizes.end(self.spec, outcome)


AUTO = {"batch_size": "auto"}


def test_a_job_whose_batch_was_halved_on_request_goes_on_with_that_after_it_was_killed(caplog):
    caplog.set_level("INFO")
    assert Job(requested=32).begin() == (32, 2)
    assert (
        "micro-batch 32 instead of 64, as 'robust-train run halve-batch' requested" in caplog.text
    )
    assert Job(requested=32, training={"batch_size": 16}).begin() == (16, 1)
    assert Job(requested=32, reuse_known_batch=False).begin() == (64, 1)
    # the effective batch is the user's: no part of it may be more, nor be too small
    assert Job(requested=16, training={"batch_size": 24}).begin() == (12, 2)
    assert Job(requested=8, min_batch_size=16).begin() == (64, 1)
    job = Job(requested=8, training={"batch_size": "auto"})
    assert (job.begin(), job.search) == ((8, 8), None)


def test_a_batch_that_ran_out_is_not_tried_again_by_the_next_job(caplog):
    caplog.set_level("INFO")
    first = Job()
    assert first.begin() == (64, 1)
    first.end(RAN_OUT)
    first.end(COMPLETED, size=16)

    second = Job()
    assert second.begin() == (16, 4)
    assert "micro-batch 16 instead of 64" in caplog.text
    assert "effective batch size stays 64 (reuse_known_batch=false tries anew)" in caplog.text
    assert isinstance(second.said[0], KnownBatchUsed)
    # what is asked for and not known to be too much is used
    assert Job(training={"batch_size": 32}).begin() == (32, 1)
    assert Job(reuse_known_batch=False).begin() == (64, 1)
    assert Job(preserve_effective_batch_size=False).begin() == (64, 1)
    # another model, another GPU, more room than there was
    assert Job(model={"name": "another"}).begin() == (64, 1)
    assert Job().begin(replace(GPU, name="NVIDIA T4")) == (64, 1)
    second.end(RAN_OUT, size=16)
    assert Job().begin() == (64, 1), "nothing is known to fit any more"


def test_auto_takes_what_is_known_to_be_the_largest_and_else_searches():
    job = Job(training=AUTO)
    assert job.begin() == (64, 1)
    assert job.search is not None
    assert job.search.effective_batch_size == 64
    job.sizes.on_event(BatchSizeFound(16, 4, 64, "x"))
    spec, outcome = job.end(COMPLETED)
    assert (spec.batch_size, spec.gradient_accumulation_steps) == (16, 4)
    assert outcome.batch_search["batch_size"] == 16

    again = Job(training=AUTO)
    assert (again.begin(), again.search) == ((16, 4), None)
    # a prediction is no reason to give somebody less than was asked for
    assert Job(training={"batch_size": 64}).begin() == (64, 1)
    # 16 is not the largest where others are to choose from
    other = Job(training={"batch_size": "auto", "effective_batch_size": 96})
    assert other.begin() == (96, 1)
    assert other.search is not None
    # less room than there was, but enough for the peak; and too little for it
    busy = Job(training=AUTO)
    assert busy.begin(replace(GPU, free_bytes=2 * GIB)) == (16, 4)
    full = Job(training=AUTO)
    assert full.begin(replace(GPU, free_bytes=GIB)) == (64, 1)
    assert full.search is not None


def test_a_size_is_searched_for_once_on_each_kind_of_device_and_run_folder():
    job = Job(training=AUTO, min_batch_size=1)
    job.begin()
    assert job.search is not None
    job.end(Outcome(Failure(FailureKind.COMM, "connection refused")))
    job.begin()
    assert job.search is not None, "the first attempt has not come to it"
    job.end(RAN_OUT)
    job.begin()
    assert job.search is None
    job.begin_on(())
    assert job.search is not None
    key = memory_key(memory_settings(job.cfg), "my.trainer", GPU, 0)
    resumed = Job({key: 8}, training=AUTO)
    assert (resumed.begin(), resumed.search) == ((8, 8), None)


@settings(max_examples=60, deadline=None)
@given(
    share=st.integers(1, 200),
    ranks=st.sampled_from((1, 2, 3)),
    least=st.integers(1, 200),
    samples=st.integers(1, 300),
    pick=st.integers(0, 20),
    used=st.integers(1, 200),
    found=st.integers(1, 300),
)
def test_what_is_found_never_changes_the_effective_batch(
    share, ranks, least, samples, pick, used, found
):
    effective = share * ranks
    cfg = {
        "training": {"batch_size": "auto", "effective_batch_size": effective},
        "min_batch_size": min(least, share),
        "num_gpus": ranks,
    }
    # the second: what lies in a run folder of another version, or of another number of ranks
    key = memory_key(memory_settings(Job(**cfg).cfg), "my.trainer", GPU, 0)
    for earlier in ({}, {key: found}):
        job = Job(earlier, **cfg)
        job.begin(*[GPU] * ranks)
        assert job.spec.effective_batch_size == effective
        sizes = () if job.search is None else job.search.sizes(samples)
        if sizes:
            size = sizes[pick % len(sizes)]
            job.sizes.on_event(BatchSizeFound(size, share // size, share, "x"))
        outcome = replace(COMPLETED, micro_batch=min(used, share))
        assert job.end(outcome)[0].effective_batch_size == effective


def test_a_script_is_not_probed_but_started_with_all(caplog):
    caplog.set_level("INFO")
    job = Job(training=AUTO, trainer={"argv": ["python", "train.py"]})
    assert (job.begin(), job.search) == ((64, 1), None)
    assert "a script cannot be probed" in caplog.text


def test_several_processes_are_not_probed_and_share_the_effective_batch(caplog):
    caplog.set_level("INFO")
    job = Job(training=AUTO, num_gpus=4)
    assert (job.begin(*[GPU] * 4), job.search) == ((16, 1), None)
    assert job.spec.effective_batch_size == 64
    assert "several processes cannot be probed" in caplog.text
    job.end(RAN_OUT)
    # alone on the CPU it accumulates as much more, and can be probed
    assert job.begin_on(()) == (64, 1)
    assert job.search.effective_batch_size == 64


def test_memory_that_others_took_says_nothing_about_the_batch():
    job = Job()
    job.begin()
    job.end(replace(RAN_OUT, gpu_free_before_bytes=100 * GIB, gpu_free_after_bytes=90 * GIB))
    job.end(COMPLETED, size=16)
    assert Job().begin() == (64, 1)


def test_sizes_that_steps_went_down_to_are_known_as_well():
    job = Job()
    job.begin()
    for size in (64, 32):
        job.sizes.on_event(
            MicroBatchChanged(1, True, size, size // 2, "OOM", FailureKind.DEVICE_OOM)
        )
    job.end(replace(COMPLETED, micro_batch=16))
    assert Job().begin() == (16, 4)
    assert Job(training={"batch_size": 32}).begin() == (16, 2)


def test_what_does_not_change_memory_does_not_change_the_key():
    def key(gpu: GpuInfo | None = GPU, **cfg: object) -> str:
        return memory_key(memory_settings(complete(cfg)), "my.trainer", gpu, 64 * GIB)

    same = key()
    assert key(training={"lr": 0.5, "batch_size": 8, "epochs": 3}, max_retries=9) == same
    assert key(replace(GPU, uuid="GPU-2", free_bytes=GIB)) == same
    different = [
        key(training={"gradient_checkpointing": True}),
        key(training={"mixed_precision": False}),
        key(model={"image_size": 384}),
        key(dataset={"name": "other"}),
        key(sequence_length=512),
        key(gpu_jobs_per_device=2),
        key(replace(GPU, total_bytes=80 * GIB)),
        key(None),
        memory_key(memory_settings(complete({})), "another.trainer", GPU, 64 * GIB),
    ]
    assert len({same, *different}) == len(different) + 1


facts = st.none() | st.builds(Fact, st.integers(1, 256), st.just(1000.0))


@given(facts, facts, facts, facts)
def test_what_is_known_never_contradicts_itself_and_the_newer_counts(a, b, fitted, too_large):
    if fitted and too_large and fitted.batch_size >= too_large.batch_size:
        return  # no attempt tells that
    known = Known().learn(a, None).learn(None, b).learn(fitted, too_large)
    if known.fitted and known.too_large:
        assert known.fitted.batch_size < known.too_large.batch_size
    if fitted:
        assert known.fitted.batch_size >= fitted.batch_size
    if too_large:
        assert known.too_large.batch_size <= too_large.batch_size


def test_old_facts_and_those_from_the_future_expire():
    now = time.time()
    for when, counts in ((now, True), (now - VALID_SECONDS - 1, False), (now + 10**6, False)):
        known = Known(Fact(8, when), Fact(16, when)).at(now, None)
        assert known == (Known(Fact(8, when), Fact(16, when)) if counts else Known())


def test_whatever_lies_in_the_cache_is_ignored_if_it_is_not_ours(tmp_path: Path, caplog):
    caplog.set_level("DEBUG")
    store, known = KnownBatches(tmp_path / "cache"), Known(Fact(8, 1.0, GIB, GIB), Fact(16, 2.0))
    assert store.read("key") == Known()
    assert not caplog.records
    store.write("key", known, {"device": "cpu"})
    assert store.read("key") == known
    path = tmp_path / "cache" / "key.json"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["key.json"]
    whole = json.loads(path.read_text())
    text = path.read_bytes()
    endless = text.replace(b'"batch_size": ', b'"batch_size": 1e999, "x": ')
    for damaged in (b"", b"\xff\xfe{", b"[]", b'{"schema": 2}', text[:-20], endless):
        path.write_bytes(damaged)
        assert store.read("key") == Known()
    path.write_text(json.dumps({**whole, "fitted": {"batch_size": "many"}}))
    assert store.read("key") == Known()
    path.unlink()
    path.mkdir()
    assert store.read("key") == Known()
    store.write("key", known, {})
    path.rmdir()
    path.symlink_to("/etc/hostname")
    assert store.read("key") == Known()
    os.mkfifo(tmp_path / "cache" / "pipe.json")
    assert store.read("pipe") == Known()
    blocked = KnownBatches(tmp_path / "cache" / "pipe.json")
    blocked.write("key", known, {})
    assert blocked.read("key") == Known()
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_files_of_another_user_are_ignored(tmp_path: Path):
    store = KnownBatches(tmp_path / "cache")
    store.write("key", Known(Fact(8, 1.0)), {})
    os.chown(tmp_path / "cache" / "key.json", 12345, 12345)
    assert store.read("key") == Known()
    os.chown(tmp_path / "cache", 12345, 12345)
    store.write("other", Known(Fact(8, 1.0)), {})
    assert not (tmp_path / "cache" / "other.json").exists()


def test_the_cache_is_where_the_user_wants_it():
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/robust-train/known-batches")
    home = {"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}
    assert cache_directory(home) == Path("/home/me/.cache/robust-train/known-batches")
    assert cache_directory({}) is None
    KnownBatches(None).write("key", Known(), {})
    assert KnownBatches(None).read("key") == Known()


def speed(samples_per_second: float, *, steps: int = 1000, rank: int = 0) -> Speed:
    return Speed(steps, 0.1, 0.2, samples_per_second, rank=rank)


def test_a_job_is_told_that_the_same_was_faster_on_such_a_gpu():
    def ends_with(*rates: float, gpus: Group = (GPU,), **figures: int) -> Outcome:
        job = Job()
        job.begin_on(gpus)
        ranks = tuple(speed(rate, rank=rank, **figures) for rank, rate in enumerate(rates))
        return job.end(replace(COMPLETED, speed=ranks))[1]

    assert ends_with(400.0).faster_before is None, "the first of its kind"
    assert ends_with(330.0).faster_before is None, "not clearly slower"
    before = ends_with(300.0).faster_before
    assert (before.samples_per_second, before.batch_size, before.num_workers) == (400.0, 64, 2)
    assert ends_with(300.0, steps=50).faster_before is None, "too short to tell"
    other = replace(GPU, name="NVIDIA A2")
    assert ends_with(30.0, gpus=(other,)).faster_before is None, "another model"
    assert ends_with(10.0, 10.0, gpus=(GPU, replace(GPU, uuid="GPU-2"))).faster_before is None
    assert ends_with(500.0).faster_before is None
    assert ends_with(300.0).faster_before.samples_per_second == 500.0


def test_what_the_launcher_itself_made_slower_is_not_blamed_on_others():
    job = Job()
    job.begin()
    job.end(replace(COMPLETED, speed=(speed(400.0),)))
    for micro_batch, checkpointing in ((16, False), (64, True)):
        slower = Job()
        slower.begin()
        slower.spec = replace(slower.spec, gradient_checkpointing=checkpointing)
        outcome = replace(COMPLETED, speed=(speed(200.0),), micro_batch=micro_batch)
        assert slower.end(outcome)[1].faster_before is None


def test_a_job_is_not_compared_with_its_own_attempts_nor_on_the_cpu():
    job = Job()
    for rate in (400.0, 100.0):
        job.begin()
        assert job.end(replace(COMPLETED, speed=(speed(rate),)))[1].faster_before is None
    for rate in (400.0, 100.0):
        job = Job(auto_device=False, device="cpu")
        job.begin_on(())
        assert job.end(replace(COMPLETED, speed=(speed(rate),)))[1].faster_before is None
