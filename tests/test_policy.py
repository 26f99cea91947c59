"""The policy: what is tried after a failure, in which order, and when it ends."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from robust_train.config.schema import RobustConfig, TrainingConfig, complete
from robust_train.policy.decide import decide, first_attempt
from robust_train.policy.sizes import PolicySettings, next_smaller, sizes
from robust_train.settings import policy_settings
from robust_train.values import (
    GIB,
    MEMORY_FAILURES,
    MIB,
    Attempt,
    AttemptSpec,
    Failure,
    FailureKind,
    GiveUp,
    GpuInfo,
    Outcome,
    Retry,
)


def gpu(index: int, free_gib: float) -> GpuInfo:
    free = int(free_gib * GIB)
    return GpuInfo(f"GPU-{index}", "A100", index, f"0000:0{index}:00.0", 80 * GIB, free, 0)


def failed(spec: AttemptSpec, kind: FailureKind = FailureKind.DEVICE_OOM) -> Attempt:
    return Attempt(spec, Outcome(Failure(kind, "out of memory")))


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


def test_halves_until_min_batch_size_then_switches_gpu_then_falls_back_to_the_cpu():
    settings = PolicySettings(batch_size=16, min_batch_size=4, max_retries=3)
    small, large = gpu(0, 10), gpu(1, 20)
    # the first one was the best at the time; the other became free later
    specs, actions, end = run_to_the_end(settings, (small, large))
    assert [(s.device, s.batch_size) for s in specs] == [
        ("cuda:0", 16),
        ("cuda:0", 8),
        ("cuda:0", 4),
        ("cuda:1", 8),  # twice the memory of the one that failed at 4
        ("cuda:1", 4),
        ("cpu", 16),
        ("cpu", 8),
        ("cpu", 4),
    ]
    gpu_actions = ["halve_batch", "halve_batch", "switch_gpu", "halve_batch", "cpu_fallback"]
    assert actions == [*gpu_actions, "halve_batch", "halve_batch"]
    assert "cuda:0 at micro-batch 16, 8, 4" in end.reason
    assert "cpu at micro-batch 16, 8, 4" in end.reason


def test_gives_a_device_up_after_max_retries_smaller_batches():
    settings = PolicySettings(batch_size=256, min_batch_size=1, max_retries=2)
    specs, actions, _ = run_to_the_end(settings, (gpu(0, 10),))
    assert [s.batch_size for s in specs if s.gpu] == [256, 128, 64]
    assert actions[:3] == ["halve_batch", "halve_batch", "cpu_fallback"]


def test_one_gpu_that_is_alike_gives_a_second_opinion_before_the_cpu_and_a_smaller_one_does_not():
    settings = PolicySettings(batch_size=256, min_batch_size=1, max_retries=2)
    alike = (gpu(0, 10), gpu(1, 9.5), gpu(2, 9.5), gpu(3, 5))
    specs, actions, _ = run_to_the_end(settings, alike)
    assert [(s.device, s.batch_size) for s in specs[:5]] == [
        ("cuda:0", 256),
        ("cuda:0", 128),
        ("cuda:0", 64),
        ("cuda:1", 64),  # the same step there is proof: nothing else is tried on GPUs
        ("cpu", 256),
    ]
    assert actions[2:4] == ["switch_gpu", "cpu_fallback"]
    specs, _, _ = run_to_the_end(settings, (gpu(0, 10), gpu(3, 5)))
    assert [s.device for s in specs if s.gpu] == ["cuda:0"] * 3
    only_here = replace(settings, may_switch_gpu=False)
    assert {s.device for s in run_to_the_end(only_here, alike)[0]} == {"cuda:0", "cpu"}


def test_a_second_opinion_that_gets_further_is_no_proof():
    settings = PolicySettings(batch_size=4, min_batch_size=4)
    one, two, three = gpu(0, 10), gpu(1, 10), gpu(2, 10)
    first = failed(first_attempt(settings, (one,)))
    decision = decide(settings, (first,), (one, two, three))
    assert isinstance(decision, Retry)
    further = Attempt(decision.spec, replace(first.outcome, end_step=900))
    third = decide(settings, (first, further), (one, two, three))
    assert isinstance(third, Retry)
    assert third.spec.device == "cuda:2"


def test_a_gpu_below_the_required_memory_is_not_tried():
    settings = PolicySettings(batch_size=4, min_batch_size=4, min_gpu_memory_bytes=30 * GIB)
    specs, _, _ = run_to_the_end(settings, (gpu(0, 10), gpu(1, 20)))
    assert [s.device for s in specs] == ["cuda:0", "cpu"]


def test_a_gpu_that_was_chosen_by_the_user_is_not_left_for_another():
    settings = PolicySettings(batch_size=4, min_batch_size=4, may_switch_gpu=False)
    specs, _, _ = run_to_the_end(settings, (gpu(0, 10), gpu(1, 20)))
    assert [s.device for s in specs] == ["cuda:0", "cpu"]


def test_gives_up_instead_of_the_cpu_where_that_is_not_allowed():
    settings = PolicySettings(batch_size=8, min_batch_size=4, allow_cpu_fallback=False)
    specs, _, end = run_to_the_end(settings, (gpu(0, 10),))
    assert all(s.gpu for s in specs)
    assert "allow_cpu_fallback is false" in end.reason


def test_host_oom_takes_workers_away_before_it_halves_and_never_changes_the_device():
    settings = PolicySettings(batch_size=8, min_batch_size=4, num_workers=4)
    specs, actions, _ = run_to_the_end(settings, (gpu(0, 10), gpu(1, 20)), FailureKind.HOST_OOM)
    assert {s.device for s in specs} == {"cuda:0"}
    assert [s.num_workers for s in specs] == [4, 2, 1, 0, 0]
    assert actions == ["fewer_workers"] * 3 + ["halve_batch"]


def test_accumulation_keeps_the_effective_batch_where_half_does_not_divide():
    # 100 = 50 × 2; half of 50 is 25; at most half of 25 the largest divisor of 100 is 10
    settings = PolicySettings(batch_size=100, min_batch_size=4)
    assert list(sizes(settings)) == [(100, 1), (50, 2), (25, 4), (10, 10), (5, 20), (4, 25)]


def test_warns_when_no_micro_batch_divides_the_effective_batch():
    settings = PolicySettings(batch_size=7, min_batch_size=2)
    decision = decide(settings, (failed(first_attempt(settings, (gpu(0, 1),))),), ())
    assert isinstance(decision, Retry)
    assert (decision.spec.batch_size, decision.spec.gradient_accumulation_steps) == (3, 3)
    assert decision.warning is not None
    assert "effective batch size 7" in decision.warning


def test_effective_batch_shrinks_with_a_warning_where_it_need_not_be_preserved():
    settings = PolicySettings(batch_size=8, preserve_effective_batch_size=False)
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
    return PolicySettings(
        batch_size=batch,
        gradient_accumulation_steps=draw(st.integers(1, 8)),
        num_workers=draw(st.integers(0, 8)),
        min_batch_size=draw(st.integers(1, batch)),
        max_retries=draw(st.integers(0, 6)),
        may_switch_gpu=draw(st.booleans()),
        allow_cpu_fallback=draw(st.booleans()),
        preserve_effective_batch_size=draw(st.booleans()),
        min_gpu_memory_bytes=draw(st.integers(0, 40)) * GIB,
    )


memory_kinds = st.lists(st.sampled_from(sorted(MEMORY_FAILURES)), min_size=1, max_size=6)


@given(settings_strategy(), gpus_strategy, memory_kinds)
def test_always_ends_and_never_goes_below_min_batch_size(settings, gpus, kinds):
    specs, _, _ = run_to_the_end(settings, gpus, kinds)
    assert all(settings.min_batch_size <= s.batch_size <= settings.batch_size for s in specs)


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
    settings = replace(settings, preserve_effective_batch_size=True)
    effective = settings.effective_batch_size
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


def test_the_defaults_of_a_policy_are_those_of_the_configuration():
    defaults = PolicySettings(batch_size=TrainingConfig.batch_size)
    configured = policy_settings(complete({}))
    assert configured == replace(
        defaults,
        num_workers=TrainingConfig.num_workers,
        min_gpu_memory_bytes=RobustConfig.min_gpu_memory_mb * MIB,
    )
