"""How a pattern of ``retry.rules`` is searched. Test_batch_config has the rules that are refused;
what rules do are journeys."""

from attempts import decided, failed, gpu, policy
from robust_train.host import search
from robust_train.model.failure import FailureKind
from robust_train.model.spec import RetryRule
from robust_train.policy.decide import first_attempt


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
