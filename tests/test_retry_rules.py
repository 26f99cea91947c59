"""``retry.rules``: the user's own rules, before the remedies."""

from __future__ import annotations

from dataclasses import replace

import pytest

import attempts
from attempts import changed, policy
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.failures import bounded_search
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError
from robust_train.model.failure import FailureKind
from robust_train.model.gpu import GpuInfo
from robust_train.model.spec import Decision, GiveUp, Retry, RetryRule
from robust_train.policy.context import excluded_after
from robust_train.policy.decide import first_attempt, with_rule
from robust_train.policy.sizes import PolicySettings
from robust_train.readable import GIB

GPUS = tuple(
    GpuInfo(f"GPU-{i}", "A100", i, f"0000:0{i}:00.0", 80 * GIB, 20 * GIB, 0) for i in range(2)
)


def settings_with(*rules: RetryRule) -> PolicySettings:
    return policy(batch_size=64, min_batch_size=16, rules=rules)


def failed(settings: PolicySettings, **record: object) -> Attempt:
    kind = record.pop("kind", FailureKind.BUG)
    spec = first_attempt(settings, GPUS[:1])
    return attempts.failed(spec, kind, message="ValueError: the loss is nan", **record)


def decided(settings: PolicySettings, *history: Attempt) -> Decision:
    return attempts.decided(settings, history, GPUS)


def test_a_bug_that_the_user_knows_is_tried_again_so_often_without_progress():
    settings = settings_with(RetryRule("retry", message="loss is nan", times=2))
    attempt = failed(settings, end_step=5)
    pauses = []
    for tries in (1, 2):
        retry = decided(settings, *[attempt] * tries)
        assert isinstance(retry, Retry)
        assert (retry.action, retry.spec) == ("retry", attempt.spec)
        assert f"retry.rules[0] ({tries} of 2)" in retry.reason
        pauses.append(retry.pause_seconds)
    assert pauses == [10, 20]
    assert isinstance(decided(settings, *[attempt] * 3), GiveUp)
    further = replace(attempt, saved_step=4, saves=1)
    assert isinstance(decided(settings, attempt, attempt, further), Retry)


def test_when_the_tries_of_a_rule_are_used_up_the_next_one_that_fits_has_all_of_its_own():
    settings = settings_with(
        RetryRule("retry", message="nan", times=2),
        RetryRule("smaller_batch", message="nan", times=1),
        RetryRule("retry", exit_code=7, times=1),
    )
    attempt = failed(settings, exit_code=7)
    reasons = [decided(settings, *[attempt] * tries).reason for tries in (1, 2, 3, 4)]
    for reason, words in zip(
        reasons,
        ("rules[0] (1 of 2)", "rules[0] (2 of 2)", "rules[1] (1 of 1)", "rules[2] (1 of 1)"),
        strict=True,
    ):
        assert words in reason
    assert isinstance(decided(settings, *[attempt] * 5), GiveUp)


def test_pauses_double_up_to_an_hour():
    settings = settings_with(RetryRule("retry", message="nan", times=3000))
    retry = decided(settings, *[failed(settings)] * 40)
    assert isinstance(retry, Retry)
    assert retry.pause_seconds == 3600
    network = changed(settings_with(), max_retries=3000, retry_pause_seconds=5000.0)
    retry = decided(network, *[failed(network, kind=FailureKind.COMM)] * 40)
    assert isinstance(retry, Retry)
    assert retry.pause_seconds == 5000


def test_who_wants_no_retries_reads_of_one_attempt():
    settings = changed(settings_with(), max_retries=0)
    decision = decided(settings, failed(settings, kind=FailureKind.COMM))
    assert ", 1 attempt without progress: giving up" in decision.reason


@pytest.mark.parametrize(
    ("rule", "outcome"),
    [
        (RetryRule("stop", exit_code=7), {"exit_code": 7}),
        (
            RetryRule("stop", message=r"^Xid \(PCI.*\): 79"),
            {"output": "a\nXid (PCI:1): 79, gone\nb"},
        ),
        (RetryRule("stop", message="^gone$"), {"output": "step 1\rstep 2\rgone\r\n"}),
        (RetryRule("stop", message="in the reader"), {"traceback": "File x, in the reader"}),
        (RetryRule("stop", exception="OSError"), {"exceptions": ("a.Lost", "builtins.OSError")}),
        (RetryRule("stop", exception="a.Lost"), {"exceptions": ("a.Lost", "builtins.OSError")}),
        (RetryRule("stop", exit_code=7, message="nan"), {"exit_code": 7}),
    ],
)
def test_a_rule_fits_by_all_that_it_names(rule: RetryRule, outcome: dict[str, object]):
    settings = settings_with(rule)
    memory = {"kind": FailureKind.DEVICE_OOM, "end_step": 3}
    decision = decided(settings, failed(settings, **memory, **outcome))
    assert isinstance(decision, GiveUp)
    assert decision.reason.endswith("retry.rules[0]: stop")
    other = {name: (0 if name == "exit_code" else type(value)()) for name, value in outcome.items()}
    retry = decided(settings, failed(settings, **memory, **other))
    assert isinstance(retry, Retry)
    assert retry.action == "halve_batch"


def test_a_smaller_batch_down_to_the_smallest_and_then_the_next_rule():
    settings = settings_with(
        RetryRule("smaller_batch", exit_code=9), RetryRule("retry", message="nan")
    )
    attempt = failed(settings, exit_code=9)
    retry = decided(settings, attempt)
    assert isinstance(retry, Retry)
    assert (retry.action, retry.spec.batch_size) == ("halve_batch", 32)
    assert retry.spec.effective_batch_size == 64
    at_least = replace(attempt, spec=replace(attempt.spec, batch_size=16))
    assert "retry.rules[1]" in decided(settings, at_least).reason


def test_a_gpu_that_the_user_blames_is_excluded_and_left_like_one_whose_hardware_failed():
    settings = settings_with(RetryRule("exclude_gpu", message="nan", times=1))
    attempt = with_rule(settings, (), failed(settings, end_step=3))
    assert set(excluded_after(attempt.failure, GPUS[:1], (1,))) == {"GPU-0"}
    retry = decided(settings, attempt)
    assert isinstance(retry, Retry)
    assert (retry.action, retry.spec.device) == ("switch_gpu", "cuda:1")
    assert "retry.rules[0] (1 of 1): exclude_gpu" in retry.reason
    second = failed(settings, end_step=4)
    assert with_rule(settings, (attempt,), second) == second, "once was wanted"
    on_cpu = replace(second, spec=first_attempt(settings, ()))
    assert with_rule(settings, (), on_cpu) == on_cpu


def test_what_was_stopped_on_request_is_no_failure():
    settings = settings_with(RetryRule("exclude_gpu", message="."))
    attempt = failed(settings, stopped_for="halve_batch")
    assert with_rule(settings, (), attempt) == attempt


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"mesage": "x", "then": "retry"}, ["retry.rules[0].mesage", "did you mean message?"]),
        ({"exception": "X"}, ["retry.rules[0].then", "retry, stop, exclude_gpu, smaller_batch"]),
        ({"exception": "X", "then": "retri"}, ["then=retri", "did you mean retry?"]),
        ({"then": "retry"}, ["retry.rules[0]", "exit_code, message, exception"]),
        ({"message": "a(", "then": "stop"}, ["retry.rules[0].message=a(", "unterminated"]),
        ({"message": 3, "then": "stop"}, ["retry.rules[0].message=3", "string"]),
        ({"message": "a{9999999999}", "then": "stop"}, ["retry.rules[0].message", "too large"]),
        ({"exception": "X", "then": "retry", "times": 0}, ["retry.rules[0].times=0", "1 or more"]),
        ({"exception": "X", "then": "stop", "times": 2}, ["retry.rules[0].times", "then=stop"]),
        ({"exit_code": 1, "then": "stop"}, ["retry.rules[0].exit_code", "use exception"]),
        ("retry", ["retry.rules[0]=retry", "mapping"]),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_in_a_line(rule: object, words: list[str]):
    with pytest.raises(ConfigError) as refused:
        checked(complete({"retry": {"rules": [rule]}}))
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


def test_a_rule_that_refers_to_a_key_that_is_not_there_is_refused_with_its_key():
    rule = {"message": "${nowhere}", "then": "stop"}
    with pytest.raises(ConfigError, match=r"^retry\.rules: .*nowhere"):
        checked(complete({"retry": {"rules": [rule]}}))


def test_a_script_has_exit_codes_and_no_exceptions():
    script = {"trainer": {"argv": ["./train"]}}
    rules = [{"exit_code": 7, "then": "retry", "times": 5}]
    config = checked(complete({**script, "retry": {"rules": rules}}))
    assert config.retry.rules == (RetryRule("retry", exit_code=7, times=5),)
    for rule in ({"exception": "X", "then": "stop"}, {"exit_code": -9, "then": "stop"}):
        with pytest.raises(ConfigError, match=r"retry.rules\[0\].ex"):
            checked(complete({**script, "retry": {"rules": [rule]}}))


def test_a_pattern_that_takes_exponential_time_is_passed_over_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(bounded_search, "LIMIT_SECONDS", 0.5)
    settings = settings_with(
        RetryRule("stop", message="(a+)+$"), RetryRule("stop", message="x.*nan")
    )
    attempt = failed(settings, output="a" * 60 + "b\nx\ud800 nan")
    assert decided(settings, attempt).reason.endswith("retry.rules[1]: stop")
    assert decided(settings, attempt).reason.endswith("retry.rules[1]: stop")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("retry.rules: message (a+)+$ is passed over: it takes more than 0.5 s")


def test_a_search_whose_process_fails_is_passed_over_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(bounded_search, "SEARCH", "raise SystemExit(3)")
    attempt = failed(settings_with(), output="out of nowhere")
    decided(settings_with(RetryRule("stop", message="nowhere")), attempt)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "retry.rules: message nowhere is passed over: its process ended with 3"
