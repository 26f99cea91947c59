"""The micro-batch with which each attempt begins, before and after a search."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attempts import failed
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.launcher.plan import find_values_used, make_policy_settings
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.policy.decide import first_attempt, first_decision
from robust_train.policy.first_size import choose_first_size
from robust_train.readable import GIB

GPU = GpuInfo("GPU-1", "NVIDIA H200", 0, "0:1", 140 * GIB, 139 * GIB, GIB)
AUTO = {"training": {"batch_size": "auto"}}


def policy(**cfg):
    cfg = complete(cfg)
    config = checked(cfg)
    return make_policy_settings(config, find_values_used(cfg, config))


def after(settings, spec, *kinds):
    """The size on this device after failures of these kinds on the first."""
    history = tuple(failed(first_attempt(settings, (GPU,)), kind) for kind in kinds)
    return choose_first_size(settings, history, spec)


@pytest.mark.parametrize(
    ("cfg", "batch", "searches", "why"),
    [
        ({}, (64, 1), True, ""),
        ({"trainer": {"argv": ["./train.py"]}}, (64, 1), False, "a script cannot be probed"),
        ({"num_gpus": 4}, (16, 1), False, "several processes cannot be probed"),
    ],
)
def test_auto_searches_where_the_trainer_can_be_probed(cfg, batch, searches, why):
    settings = policy(**AUTO, **cfg)
    first = first_decision(settings, [GPU] * settings.config.num_gpus)
    spec = first.spec
    assert (spec.batch_size, spec.gradient_accumulation_steps) == batch
    assert (spec.effective_batch_size, spec.noted("searches", False)) == (64, searches)
    assert why in first.reason
    # alone on the CPU several processes accumulate as much more, and can be probed
    on_cpu, _ = after(settings, first_attempt(settings, ()), FailureKind.DEVICE_OOM)
    assert on_cpu.batch_size == 64
    assert on_cpu.noted("searches", False) == settings.config.traits.can_be_probed


def test_each_kind_of_device_searches_sizes_once():
    settings = policy(**AUTO, min_batch_size=1)
    spec = first_attempt(settings, (GPU,))
    again, _ = after(settings, spec, FailureKind.COMM)
    assert again.noted("searches", False), "the first attempt has not reached its search"
    stands, why = after(settings, spec, FailureKind.COMM, FailureKind.DEVICE_OOM)
    assert (stands.noted("searches", False), why) == (False, "")


@settings(max_examples=15)
@given(share=st.integers(1, 200), ranks=st.sampled_from((1, 2, 3)), least=st.integers(1, 200))
def test_auto_never_changes_the_effective_batch(share, ranks, least):
    training = {"batch_size": "auto", "effective_batch_size": share * ranks}
    job = policy(training=training, min_batch_size=min(least, share), num_gpus=ranks)
    spec = first_decision(job, [GPU] * ranks).spec
    assert spec.effective_batch_size == share * ranks


@pytest.mark.parametrize(
    ("words", "is_split"),
    [
        ("{batch_size}", True),
        ("{effective_batch_size} {gradient_accumulation_steps}", True),
        ("{effective_batch_size}", False),
    ],
)
def test_dividing_by_the_accumulation_gives_a_micro_batch(words, is_split):
    """A script divides the effective batch by it."""
    job = policy(trainer={"argv": ["./train.py", *words.split()]})
    assert job.asked.has_batch == is_split
