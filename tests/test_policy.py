"""What holds for every decision of the policy, whatever fails; the single steps are journeys."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attempts import KEYS_OF_A_PROJECT, decided, failed, gpu, keys_at_the_root, policy, with_key
from robust_train.config.words import Words
from robust_train.failures.advice import with_advice
from robust_train.features.retry_rules.model import RetryKeys
from robust_train.host import search
from robust_train.model.failure import MEMORY_FAILURES, Clue, Evidence, Failure, FailureKind
from robust_train.model.spec import GiveUp, Retry, RetryRule
from robust_train.policy.context import FailureContext, Offers
from robust_train.policy.decide import first_attempt, place_on_gpus
from robust_train.policy.gpus import gpus_to_exclude
from robust_train.policy.settings import list_sizes
from robust_train.readable import GIB

figures = st.integers(0, 80 * GIB)
clues = [value for name, value in vars(Clue).items() if name.isupper()]
evidence_strategy = st.builds(
    Evidence,
    requested_bytes=st.none() | figures,
    reserved_unallocated_bytes=st.none() | figures,
    free_bytes=st.none() | figures,
    own_limit=st.booleans(),
    clue=st.none() | st.sampled_from(clues),
)
machines = st.lists(st.floats(0.1, 80), max_size=4).map(
    lambda free: tuple(gpu(index, gib) for index, gib in enumerate(free))
)


@st.composite
def jobs(draw):
    batch = draw(st.integers(1, 256))
    return policy(
        batch,
        draw(st.integers(1, 4)),
        num_workers=draw(st.integers(0, 8)),
        min_batch_size=draw(st.integers(1, batch)),
        max_retries=draw(st.none() | st.integers(0, 4)),
        auto_device=draw(st.booleans()),
        allow_cpu_fallback=draw(st.booleans()),
        expandable_segments=draw(st.booleans()),
        wait_for_gpu=draw(st.booleans()),
        reports_start=draw(st.booleans()),
    )


@given(st.data())
def test_any_series_of_failures_ends(data):
    """It keeps the effective batch and takes the CPU last."""
    settings, gpus = data.draw(jobs()), data.draw(machines)
    held = tuple(gpu(index + 10, 9) for index in range(data.draw(st.integers(0, 2))))
    spec = first_attempt(settings, gpus[:1])
    requested = settings.asked
    history = ()
    visited = [spec.device_key]
    while True:
        kind = data.draw(st.sampled_from(sorted(FailureKind)))
        evidence = data.draw(evidence_strategy)
        parts = st.integers(settings.min_batch_size, requested.batch_size)
        record = {
            "start_step": data.draw(st.integers(0, 2)),
            "end_step": data.draw(st.none() | st.integers(0, 3)),
            "saved_step": data.draw(st.none() | st.integers(0, 3)),
            "checkpoint": data.draw(st.none() | st.sampled_from(["1.pt", "2.pt"])),
            "gpu_free_before_bytes": data.draw(st.none() | figures),
            "gpu_free_after_bytes": data.draw(st.none() | figures),
            "micro_batch": data.draw(st.none() | parts),
        }
        history += (failed(spec, kind, evidence, **record),)
        decision = decided(settings, history, gpus, held)
        if isinstance(decision, Retry) and decision.otherwise and data.draw(st.booleans()):
            decision = decision.otherwise
        if isinstance(decision, GiveUp):
            return
        if kind is FailureKind.BUG and evidence.clue == Clue.UNKNOWN:
            assert any(attempt.checkpoint for attempt in history)
        else:
            assert kind is not FailureKind.BUG or evidence.clue == Clue.CRASHED
        assert kind is not FailureKind.INTERRUPTED or evidence.clue == Clue.KILLED
        # On the CPU no GPU can be at fault, whatever a message says.
        is_fault = kind is FailureKind.DEVICE_FAULT and evidence.clue == Clue.HARDWARE
        is_ill = is_fault and bool(spec.gpus)
        before, spec = spec, decision.spec
        if decision.room is not None and not decision.room.gpu_uuids:
            others = [g for g in (*held, *gpus) if g.uuid not in decision.room.exclude]
            assert not (is_ill and before.gpus[0] in others)
            spec = replace(spec, gpus=(data.draw(st.sampled_from(others)),))
            visited.append(spec.device_key)
        elif is_ill and decision.action != "no_expandable_segments":
            assert spec.device_key != before.device_key
        assert settings.min_batch_size <= spec.batch_size <= requested.batch_size
        if requested.effective_batch_size % spec.batch_size == 0:
            assert spec.effective_batch_size == requested.effective_batch_size
        if FailureContext(settings, history, Offers(gpus)).since_progress[0] is history[-1]:
            visited = visited[-1:]  # the tries are renewed, of devices too
        if spec.device_key != visited[-1]:
            assert spec.device_key not in visited
            visited.append(spec.device_key)
        assert "cpu" not in visited[:-1], "the CPU is the last device"
        assert history.count(history[-1]) < 100
        assert len(history) < 400, "does not end"


@given(st.data())
def test_a_projects_messages_use_its_users_keys(data):
    """Keys are written as its user writes them."""
    kinds, theirs = st.sampled_from(sorted(FailureKind)), sorted(KEYS_OF_A_PROJECT)
    settings, gpus = data.draw(jobs()), data.draw(machines)
    config = replace(
        settings.config,
        theirs={key: KEYS_OF_A_PROJECT[key] for key in data.draw(st.sets(st.sampled_from(theirs)))},
        of_features=(
            RetryKeys(data.draw(st.sampled_from([(), (RetryRule("retry", message="theirs"),)]))),
        ),
        preserve_effective_batch_size=data.draw(st.sampled_from([None, True, False])),
    )
    config = with_key(config, "min_num_gpus", data.draw(st.sampled_from([None, 1])))
    settings = type(settings).of(config)
    words = Words(config.theirs)
    said, spec = "training.batch_size=8: their own words", first_attempt(settings, gpus[:1])
    history = ()
    for _ in range(data.draw(st.integers(1, 6))):
        kind, evidence = data.draw(kinds), data.draw(evidence_strategy)
        steps = {"end_step": data.draw(st.none() | st.integers(0, 3))}
        attempt = failed(spec, kind, evidence, message=said, **steps)
        attempt = words.reword_attempt(with_advice(attempt, config))
        history += (attempt,)
        decision = words.reword_decision(decided(settings, history, gpus), quoted=said)
        texts = list(attempt.failure.advice)
        while decision:
            texts += [decision.reason, getattr(decision, "warning", "")]
            spec = getattr(decision, "spec", spec)
            decision = getattr(decision, "otherwise", None)
        assert attempt.failure.message == said
        prefetch = spec.noted("prefetch_factor", 2)
        assert prefetch == config.training.prefetch_factor, "they have no key for it"
        assert [key for text in texts for key in keys_at_the_root(text.replace(said, ""))] == []


def test_a_project_learns_to_name_its_batch():
    """No one knows which key is the batch."""
    config = replace(policy(8, allow_cpu_fallback=True).config, theirs={})
    settings = type(policy()).of(config)
    attempt = failed(first_attempt(settings, ()), FailureKind.HOST_OOM)
    decision = decided(settings, (attempt,))
    assert "robust.training.batch_size='${its.name}'" in decision.reason
    assert "the command has no" not in decision.reason


@given(jobs(), machines, st.lists(st.sampled_from(sorted(MEMORY_FAILURES)), min_size=1, max_size=6))
def test_no_size_beyond_memory_is_tried_twice(settings, gpus, kinds):
    tried = [first_attempt(settings, gpus[:1])]
    history = ()
    while True:
        history += (failed(tried[-1], kinds[len(history) % len(kinds)]),)
        decision = decided(settings, history, gpus)
        if isinstance(decision, GiveUp):
            break
        tried.append(decision.spec)
    assert len(set(tried)) == len(tried)


@given(jobs())
def test_the_effective_batch_is_exact_with_divisors(settings):
    """There is a divisor within the range."""
    effective, least = settings.asked.effective_batch_size, settings.min_batch_size
    for batch in list_sizes(settings):
        if batch == least:
            continue
        smaller = settings.next_smaller(batch)
        accumulation = settings.resize(settings.asked, smaller).gradient_accumulation_steps
        in_range = range(least, max(batch // 2, least) + 1)
        assert smaller in in_range
        if any(effective % candidate == 0 for candidate in in_range):
            assert smaller * accumulation == effective
        else:
            assert smaller * (accumulation - 1) < effective <= smaller * accumulation


def test_a_gpuless_device_fault_is_retried_once():
    """It is retried from a checkpoint."""
    settings = policy(64)
    spec = first_attempt(settings, ())
    unsaved = failed(spec, FailureKind.DEVICE_FAULT)
    at_once = decided(settings, (unsaved,))
    assert isinstance(at_once, GiveUp)
    assert "again" not in at_once.reason
    saved = failed(spec, FailureKind.DEVICE_FAULT, saved_step=3, saves=1, checkpoint="3.pt")
    decision = decided(settings, (saved,))
    assert isinstance(decision, Retry)
    assert "once more, from the last checkpoint, 3.pt" in decision.reason
    assert isinstance(decided(settings, (saved, unsaved)), GiveUp)


@given(
    st.integers(1, 64), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8)
)
@example(8, 1, 6, 1, 5)
def test_fewer_gpus_keep_the_effective_batch(batch_size, accumulation, ranks, fewest, least):
    """The micro-batch does not grow."""
    keys = {"min_num_gpus": min(fewest, ranks), "min_batch_size": min(least, batch_size)}
    settings = policy(batch_size, accumulation, num_gpus=ranks, **keys)
    spec = first_attempt(settings, tuple(gpu(index, 40) for index in range(ranks)))
    counts = settings.fewer_ranks(ranks)
    assert list(counts) == sorted(counts, reverse=True)
    for count in counts:
        assert keys["min_num_gpus"] <= count < ranks
        fewer = place_on_gpus(settings, (), Retry(spec, "wait", ""), spec.gpus[:count]).spec
        assert (fewer.ranks, len(fewer.gpus)) == (count, count)
        again = [fewer] + [
            place_on_gpus(settings, (), Retry(fewer, "wait", ""), spec.gpus[:left]).spec
            for left in settings.fewer_ranks(count)
        ]
        for smaller in again:
            assert smaller.effective_batch_size == settings.asked.effective_batch_size
            assert settings.min_batch_size <= smaller.batch_size <= batch_size
    config = replace(settings.config, preserve_effective_batch_size=True)
    requested = replace(settings.asked, accumulates=False)
    assert replace(settings, config=config, asked=requested).fewer_ranks(ranks) == ()


@pytest.mark.parametrize(("accumulates", "size"), [(False, 7), (True, 6)])
def test_fewer_gpus_take_no_batch_that_failed(accumulates, size):
    """A script that is given no accumulation has another effective batch either way."""
    settings = policy(30, num_gpus=2, min_num_gpus=1)
    requested = replace(settings.asked, accumulates=accumulates)
    settings = replace(settings, asked=requested)
    spec = settings.resize(first_attempt(settings, (gpu(0, 40), gpu(1, 40))), 7)
    fewer = place_on_gpus(settings, (), Retry(spec, "fewer_gpus", ""), spec.gpus[:1]).spec
    assert fewer.batch_size == size


def test_a_reduced_group_waits_for_its_size():
    """It has lost a GPU before and waits for as many as it has."""
    settings = policy(24, num_gpus=4, min_num_gpus=2)
    group = tuple(gpu(index, 40) for index in range(4))
    three = place_on_gpus(
        settings, (), Retry(first_attempt(settings, group), "wait", ""), group[:3]
    ).spec
    again = failed(three, FailureKind.DEVICE_FAULT, Evidence(clue=Clue.HARDWARE), rank=2)
    assert decided(settings, (again,), group[:3], (gpu(4, 40),)).room.counts == (3,)
    assert decided(settings, (again,), group[:3]).room.counts == (2,)


def test_a_users_rule_keeps_the_loss():
    """A rule that cannot act is skipped: parts of this batch would have another loss."""
    settings = policy(8, rules=(RetryRule("smaller_batch", message="sum"),))
    spec = first_attempt(settings, ())
    for changes, action in (("", "halve_batch"), ("its loss is a sum", "give_up")):
        bug = failed(spec, FailureKind.BUG, message="a sum", split_changes=changes)
        assert decided(settings, (bug,)).action == action


def test_a_disks_retry_names_the_disk():
    """The error does not name it."""
    settings = policy(8)
    spec = first_attempt(settings, ())
    cut_off = failed(spec, FailureKind.DISK_FULL, message="unexpected pos 3392 vs 3344")
    reason = decided(settings, (cut_off,)).reason
    assert reason.startswith("disk full or failing (unexpected pos 3392 vs 3344): the same again")


@pytest.mark.parametrize("name", ["last.pt", "version_{}/last.pt"])
def test_a_script_that_starts_over_is_stopped(name):
    """It saves as much as a script that resumes, and need not report steps."""
    settings = policy(64, min_batch_size=64, allow_cpu_fallback=False)
    spec = first_attempt(settings, (gpu(0, 20),))
    history = ()
    for number in range(50):
        saved = {"saves": 3, "checkpoint": name.format(number)}
        history += (failed(spec, FailureKind.DEVICE_OOM, **saved),)
        if isinstance(decided(settings, history), GiveUp):
            break
    assert 20 <= len(history) < 30
    # a step that is reported, and saved, begins the count again
    further = failed(spec, FailureKind.DEVICE_OOM, end_step=9, saved_step=8, saves=1)
    assert decided(settings, (*history, further)).spec == spec


def test_the_host_excludes_by_the_same_evidence():
    """It excludes GPUs after a fault."""
    first = gpu(0, 1)
    second = gpu(1, 1)
    hardware = Evidence(clue=Clue.HARDWARE)
    ecc = Failure(FailureKind.DEVICE_FAULT, "uncorrectable ECC error", hardware)
    assert gpus_to_exclude(ecc, (first,), {"GPU-0"}) == {"GPU-0": "uncorrectable ECC error"}
    # which of the two is not known
    assert gpus_to_exclude(ecc, (first, second), {"GPU-0", "GPU-1"}) == {}
    address = replace(ecc, evidence=Evidence())
    assert gpus_to_exclude(address, (first,), {"GPU-0"}) == {}
    assert set(gpus_to_exclude(address, (first, second), {"GPU-0"})) == {"GPU-1"}
    assert gpus_to_exclude(replace(ecc, kind=FailureKind.DEVICE_OOM), (first,), ()) == {}


# --- how a pattern of `retry.rules` is searched ---


def reason_with(output, *messages):
    """The reason of the decision after a bug, with rules to stop at these messages."""
    settings = policy(rules=tuple(RetryRule("stop", message=message) for message in messages))
    spec = first_attempt(settings, (gpu(0, 20),))
    return decided(settings, (failed(spec, FailureKind.BUG, output=output),)).reason


def test_an_exponential_pattern_is_skipped(monkeypatch, caplog):
    """One line says so."""
    monkeypatch.setattr(search, "LIMIT_SECONDS", 2.0)
    for _ in range(2):
        reason = reason_with("a" * 60 + "b\nx\ud800 nan", "(a+)+$", "x.*nan")
        assert reason.endswith("retry.rules[1]: stop")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("retry.rules: message (a+)+$ is skipped: the search took more than 2 s")


def test_a_failing_search_is_skipped(monkeypatch, caplog):
    """Its process fails; a line says so."""
    monkeypatch.setattr(search, "SEARCH", "raise SystemExit(3)")
    reason_with("out of nowhere", "nowhere")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "retry.rules: message nowhere is skipped: the search process ended with 3"
