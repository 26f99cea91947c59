"""The micro-batch with which each attempt begins, before and after a search."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from attempts import failed
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.launcher.inputs import policy_settings, search_prefix
from robust_train.model.attempt import Attempt
from robust_train.model.events import BatchSizeFound
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.spec import AttemptSpec, Retry
from robust_train.policy.decide import first_attempt, first_decision
from robust_train.policy.sizes import PolicySettings, size_to_begin_with
from robust_train.readable import GIB

GPU = GpuInfo("GPU-1", "NVIDIA H200", 0, "0:1", 140 * GIB, 139 * GIB, GIB)
AUTO = {"batch_size": "auto"}


def policy(
    found: dict[str, int] | None = None, requested: int | None = None, **cfg: object
) -> PolicySettings:
    """The settings of a job whose run folder knows these sizes, by kind of device."""
    return policy_settings(checked(complete(cfg)), found, requested)


def begin(settings: PolicySettings, *gpus: GpuInfo) -> Retry:
    return first_decision(settings, gpus or (GPU,))


def sizes(decision: Retry) -> tuple[int, int]:
    return decision.spec.batch_size, decision.spec.gradient_accumulation_steps


def test_a_job_whose_batch_was_halved_on_request_goes_on_with_that_after_it_was_killed():
    first = begin(policy(requested=32))
    assert sizes(first) == (32, 2)
    requested = "micro-batch 32 instead of 64, as 'robust-train halve-batch' requested"
    assert requested in first.reason
    assert sizes(begin(policy(requested=32, training={"batch_size": 16}))) == (16, 1)
    # the effective batch is the user's: no part of it may be more, nor be too small
    assert sizes(begin(policy(requested=16, training={"batch_size": 24}))) == (12, 2)
    assert sizes(begin(policy(requested=8, min_batch_size=16))) == (64, 1)
    auto = begin(policy(requested=8, training=AUTO))
    assert (sizes(auto), auto.spec.searches) == ((8, 8), False)


def test_auto_searches_among_the_parts_of_the_effective_batch():
    spec = begin(policy(training=AUTO)).spec
    assert (spec.batch_size, spec.gradient_accumulation_steps, spec.searches) == (64, 1, True)
    found = Attempt(1, spec).after(BatchSizeFound(16, 4, 64, "x"))
    assert (found.spec.batch_size, found.spec.gradient_accumulation_steps) == (16, 4)
    assert (found.spec.searches, found.batch_size_found["batch_size"]) == (False, 16)


def test_a_size_is_searched_for_once_on_each_kind_of_device_and_run_folder():
    settings = policy(training=AUTO, min_batch_size=1)
    spec = begin(settings).spec
    refused = failed(spec, FailureKind.COMM)
    again, _ = size_to_begin_with(settings, (refused,), spec)
    assert again.searches, "the first attempt has not come to it"
    ran_out = failed(spec, FailureKind.DEVICE_OOM)
    stands, why = size_to_begin_with(settings, (refused, ran_out), spec)
    assert (stands.searches, why) == (False, "")
    on_cpu, _ = size_to_begin_with(settings, (refused, ran_out), first_attempt(settings, ()))
    assert on_cpu.searches
    resumed = begin(policy({spec.device_kind: 8}, training=AUTO, min_batch_size=1))
    assert (sizes(resumed), resumed.spec.searches) == ((8, 8), False)


@settings(max_examples=15)
@given(
    share=st.integers(1, 200),
    ranks=st.sampled_from((1, 2, 3)),
    least=st.integers(1, 200),
    found=st.integers(1, 300),
)
def test_what_is_found_never_changes_the_effective_batch(share, ranks, least, found):
    effective = share * ranks
    cfg = {
        "training": {"batch_size": "auto", "effective_batch_size": effective},
        "min_batch_size": min(least, share),
        "num_gpus": ranks,
    }
    # the second: what lies in a run folder of another number of ranks
    for earlier in ({}, {f"{GPU.name} {GPU.total_bytes}": found}):
        spec = begin(policy(earlier, **cfg), *[GPU] * ranks).spec
        assert spec.effective_batch_size == effective


def test_a_script_is_not_probed_but_started_with_all():
    first = begin(policy(training=AUTO, trainer={"argv": ["python", "train.py"]}))
    assert (sizes(first), first.spec.searches) == ((64, 1), False)
    assert "a script cannot be probed" in first.reason


def test_several_processes_are_not_probed_and_share_the_effective_batch():
    settings = policy(training=AUTO, num_gpus=4)
    first = begin(settings, *[GPU] * 4)
    assert (sizes(first), first.spec.searches) == ((16, 1), False)
    assert first.spec.effective_batch_size == 64
    assert "several processes cannot be probed" in first.reason
    # alone on the CPU it accumulates as much more, and can be probed
    ran_out = failed(first.spec, FailureKind.DEVICE_OOM)
    on_cpu, _ = size_to_begin_with(settings, (ran_out,), first_attempt(settings, ()))
    assert (on_cpu.batch_size, on_cpu.searches) == (64, True)


def test_a_size_that_was_found_holds_for_the_same_config_trainer_and_kind_of_gpu():
    def key(trainer: str = "my.trainer", gpu: GpuInfo | None = GPU, **cfg: object) -> str:
        spec = AttemptSpec((gpu,) if gpu else (), 64, 1, searches=True)
        return search_prefix(complete(cfg), trainer) + spec.device_kind

    same = key()
    assert key(gpu=replace(GPU, uuid="GPU-2", free_bytes=GIB)) == same
    different = [
        key(training={"gradient_checkpointing": True}),
        key(training={"mixed_precision": False}),
        key(model={"image_size": 384}),
        key(dataset={"name": "other"}),
        key(sequence_length=512),
        key(gpu_jobs_per_device=2),
        key(gpu=replace(GPU, total_bytes=80 * GIB)),
        key(gpu=None),
        key("another.trainer"),
    ]
    assert len({same, *different}) == len(different) + 1
