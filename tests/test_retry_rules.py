"""``retry.rules``: what is refused, and how a pattern is searched; what rules do are journeys."""

import pytest

from attempts import decided, failed, gpu, policy
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.host import search
from robust_train.model.errors import ConfigError
from robust_train.model.failure import FailureKind
from robust_train.model.spec import RetryRule
from robust_train.policy.decide import first_attempt


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
def test_a_rule_that_cannot_be_used_is_refused_in_a_line(rule, words):
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


def reason_with(output, *messages):
    """The reason of the decision after a bug, with rules to stop at these messages."""
    settings = policy(rules=tuple(RetryRule("stop", message=one) for one in messages))
    spec = first_attempt(settings, (gpu(0, 20),))
    return decided(settings, (failed(spec, FailureKind.BUG, output=output),)).reason


def test_a_pattern_that_takes_exponential_time_is_passed_over_in_a_line(monkeypatch, caplog):
    monkeypatch.setattr(search, "LIMIT_SECONDS", 0.5)
    for _ in range(2):
        reason = reason_with("a" * 60 + "b\nx\ud800 nan", "(a+)+$", "x.*nan")
        assert reason.endswith("retry.rules[1]: stop")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("retry.rules: message (a+)+$ is skipped: it takes more than 0.5 s")


def test_a_search_whose_process_fails_is_passed_over_in_a_line(monkeypatch, caplog):
    monkeypatch.setattr(search, "SEARCH", "raise SystemExit(3)")
    reason_with("out of nowhere", "nowhere")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "retry.rules: message nowhere is skipped: its process ended with 3"
