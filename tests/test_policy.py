"""The policy: what is tried after a failure, in which order, and when it ends."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import attempts
from attempts import changed, gpu, policy
from attempts import decided as decide
from robust_train.model.attempt import Attempt
from robust_train.model.failure import MEMORY_FAILURES, FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.spec import AttemptSpec, GiveUp, Retry
from robust_train.policy.decide import first_attempt
from robust_train.policy.sizes import PolicySettings, next_smaller, sizes


def failed(spec: AttemptSpec, kind: FailureKind = FailureKind.DEVICE_OOM) -> Attempt:
    return attempts.failed(spec, kind, message="out of memory")


def run_to_the_end(
    settings: PolicySettings,
    gpus: tuple[GpuInfo, ...],
    fails: list[FailureKind] | FailureKind = FailureKind.DEVICE_OOM,
) -> tuple[list[AttemptSpec], list[str], GiveUp]:
    """Every attempt fails; returns what was tried, the actions between, and the end."""
    spec = first_attempt(settings, gpus[:1])
    history: tuple[Attempt, ...] = ()
    specs, actions = [spec], []
    while True:
        kind = fails if isinstance(fails, FailureKind) else fails[len(history) % len(fails)]
        history += (failed(spec, kind),)
        decision = decide(settings, history, gpus)
        if isinstance(decision, GiveUp):
            return specs, actions, decision
        spec = decision.spec
        specs.append(spec)
        actions.append(decision.action)
        assert len(specs) < 500, "does not terminate"


def test_a_second_opinion_that_gets_further_is_no_proof():
    settings = policy(4, min_batch_size=4)
    one, two, three = gpu(0, 10), gpu(1, 10), gpu(2, 10)
    first = failed(first_attempt(settings, (one,)))
    decision = decide(settings, (first,), (one, two, three))
    assert isinstance(decision, Retry)
    further = replace(failed(decision.spec), end_step=900)
    third = decide(settings, (first, further), (one, two, three))
    assert isinstance(third, Retry)
    assert third.spec.device == "cuda:2"


def test_accumulation_keeps_the_effective_batch_where_half_does_not_divide():
    # 100 = 50 × 2; half of 50 is 25; at most half of 25 the largest divisor of 100 is 10
    settings = policy(batch_size=100, min_batch_size=4)
    assert list(sizes(settings)) == [(100, 1), (50, 2), (25, 4), (10, 10), (5, 20), (4, 25)]


def test_warns_when_no_micro_batch_divides_the_effective_batch():
    settings = policy(batch_size=7, min_batch_size=2)
    decision = decide(settings, (failed(first_attempt(settings, (gpu(0, 1),))),), ())
    assert isinstance(decision, Retry)
    assert (decision.spec.batch_size, decision.spec.gradient_accumulation_steps) == (3, 3)
    assert decision.warning is not None
    assert "effective batch size 7" in decision.warning


def test_effective_batch_shrinks_with_a_warning_where_it_need_not_be_preserved():
    settings = policy(batch_size=8, preserve_effective_batch_size=False)
    decision = decide(settings, (failed(first_attempt(settings, ())),), ())
    assert isinstance(decision, Retry)
    assert decision.spec.effective_batch_size == 4
    assert decision.warning is not None
    assert "preserve_effective_batch_size is false" in decision.warning


gpus_strategy = st.lists(st.floats(0.1, 80), min_size=0, max_size=5).map(
    lambda sizes: tuple(
        sorted((gpu(i, s) for i, s in enumerate(sizes)), key=lambda g: -g.free_bytes)
    )
)


@st.composite
def settings_strategy(draw: st.DrawFn) -> PolicySettings:
    batch = draw(st.integers(1, 512))
    return policy(
        batch_size=batch,
        gradient_accumulation_steps=draw(st.integers(1, 8)),
        num_workers=draw(st.integers(0, 8)),
        min_batch_size=draw(st.integers(1, batch)),
        max_retries=draw(st.integers(0, 6)),
        auto_device=draw(st.booleans()),
        allow_cpu_fallback=draw(st.booleans()),
        preserve_effective_batch_size=draw(st.booleans()),
        min_gpu_memory_mb=draw(st.integers(0, 40)) * 1024,
    )


memory_kinds = st.lists(st.sampled_from(sorted(MEMORY_FAILURES)), min_size=1, max_size=6)


@given(settings_strategy(), gpus_strategy, memory_kinds)
def test_always_ends_and_never_goes_below_min_batch_size(settings, gpus, kinds):
    specs, _, _ = run_to_the_end(settings, gpus, kinds)
    assert all(settings.min_batch_size <= s.batch_size <= settings.asked.batch_size for s in specs)


@given(settings_strategy(), gpus_strategy, memory_kinds)
def test_never_returns_to_a_device_that_was_given_up(settings, gpus, kinds):
    specs, _, _ = run_to_the_end(settings, gpus, kinds)
    visits = [
        s.device_key
        for i, s in enumerate(specs)
        if not i or specs[i - 1].device_key != s.device_key
    ]
    assert len(visits) == len(set(visits))


@given(settings_strategy(), gpus_strategy, memory_kinds)
def test_never_tries_the_same_thing_twice(settings, gpus, kinds):
    specs, _, _ = run_to_the_end(settings, gpus, kinds)
    assert len(set(specs)) == len(specs)


@given(settings_strategy())
def test_effective_batch_is_exact_wherever_a_divisor_lies_in_range(settings):
    settings = changed(settings, preserve_effective_batch_size=True)
    effective = settings.asked.effective_batch_size
    for batch, _ in list(sizes(settings)):
        if batch == settings.min_batch_size:
            continue
        smaller, accumulation = next_smaller(settings, batch)
        in_range = range(settings.min_batch_size, max(batch // 2, settings.min_batch_size) + 1)
        assert smaller in in_range
        if any(effective % candidate == 0 for candidate in in_range):
            assert smaller * accumulation == effective
        else:
            assert smaller * accumulation >= effective
            assert smaller * (accumulation - 1) < effective


@given(
    settings_strategy(),
    gpus_strategy,
    st.sampled_from([FailureKind.BUG, FailureKind.INTERRUPTED]),
    st.integers(0, 3),
)
def test_bugs_and_interruptions_are_never_retried(settings, gpus, kind, memory_failures_before):
    spec = first_attempt(settings, gpus[:1])
    history = (failed(spec),) * memory_failures_before + (failed(spec, kind),)
    assert isinstance(decide(settings, history, gpus), GiveUp)
