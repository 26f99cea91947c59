"""The micro-batch with which each attempt begins, before and after a search."""

from hypothesis import given, settings
from hypothesis import strategies as st

from attempts import failed
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.launcher.inputs import policy_settings, values_used
from robust_train.model.attempt import Attempt
from robust_train.model.events import BatchSizeFound
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.policy.decide import first_attempt, first_decision
from robust_train.policy.sizes import size_to_begin_with
from robust_train.readable import GIB

GPU = GpuInfo("GPU-1", "NVIDIA H200", 0, "0:1", 140 * GIB, 139 * GIB, GIB)
AUTO = {"batch_size": "auto"}


def policy(**cfg):
    cfg = complete(cfg)
    config = checked(cfg)
    return policy_settings(config, values_used(cfg, config))


def begin(settings, *gpus):
    return first_decision(settings, gpus or (GPU,))


def sizes(decision):
    return decision.spec.batch_size, decision.spec.gradient_accumulation_steps


def test_auto_searches_among_the_parts_of_the_effective_batch():
    spec = begin(policy(training=AUTO)).spec
    assert (spec.batch_size, spec.gradient_accumulation_steps, spec.searches) == (64, 1, True)
    found = Attempt(1, spec).after(BatchSizeFound(16, 4, 64))
    assert (found.spec.batch_size, found.spec.gradient_accumulation_steps) == (16, 4)
    assert (found.spec.searches, found.batch_size_found["batch_size"]) == (False, 16)


def test_a_size_is_searched_for_once_on_each_kind_of_device():
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


@settings(max_examples=15)
@given(
    share=st.integers(1, 200),
    ranks=st.sampled_from((1, 2, 3)),
    least=st.integers(1, 200),
)
def test_auto_never_changes_the_effective_batch(share, ranks, least):
    effective = share * ranks
    cfg = {
        "training": {"batch_size": "auto", "effective_batch_size": effective},
        "min_batch_size": min(least, share),
        "num_gpus": ranks,
    }
    assert begin(policy(**cfg), *[GPU] * ranks).spec.effective_batch_size == effective


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
