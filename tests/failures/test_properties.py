"""What holds for every message, whatever it says."""

import builtins
import signal

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from failures.messages import CASES
from robust_train.failures import classify_exit, classify_failure
from robust_train.failures.error_reports import PROGRAMMING_ERRORS
from robust_train.failures.patterns import find_pattern
from robust_train.model.failure import FailureKind

KERNEL_OOM = find_pattern("KERNEL_OOM")

# of the classes of Python itself, those that a text can make
EXCEPTIONS = [
    kind
    for name in dir(builtins)
    if isinstance(kind := getattr(builtins, name), type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (UnicodeError, Warning))
    and "Group" not in name
]
MISTAKES = [kind for kind in EXCEPTIONS if kind.__name__ in PROGRAMMING_ERRORS]
# vLLM says with a ValueError that the device's memory is full
REAL_MESSAGES = [case.message for case in CASES if case.raised_by != "ValueError"]

real_messages = st.sampled_from(REAL_MESSAGES)
# pieces of real messages in any order: near to all patterns, and no message that anyone knows
words = st.lists(
    st.sampled_from(sorted({word for message in REAL_MESSAGES for word in message.split()})),
    max_size=12,
).map(" ".join)
texts = st.one_of(st.text(max_size=200), real_messages, words)
anything = settings(max_examples=100)


@anything
@given(texts, st.sampled_from(EXCEPTIONS))
def test_never_raises_and_says_it_on_one_line(text, kind):
    failure = classify_failure(kind(text))
    assert isinstance(failure.kind, FailureKind)
    assert "\n" not in failure.message
    assert len(failure.message) <= 400


@anything
@given(st.integers(min_value=-70, max_value=260), texts, st.sampled_from([None, True, False]))
def test_never_raises_on_what_a_process_left(code, log, killed):
    failure = classify_exit(code, log, oom_killed=killed)
    assert isinstance(failure.kind, FailureKind)
    if killed and code in (-9, 137):
        assert (failure.kind, failure.evidence.library) == (FailureKind.HOST_OOM, "kernel")


@anything
@given(texts, st.sampled_from(MISTAKES))
def test_a_programs_mistake_is_always_a_bug(text, kind):
    """Its message does not matter."""
    assume("Traceback" not in text)  # a message that quotes another error's is that error's
    assert classify_failure(kind(text)).kind is FailureKind.BUG


@anything
@given(texts, texts, st.sampled_from(MISTAKES))
def test_a_traceback_ending_in_a_mistake_means_bug(logged, message, kind):
    """It does not matter what was logged before."""
    assume("Traceback" not in logged + message and not KERNEL_OOM.words.search(logged + message))
    end = f"{kind.__name__}: {' '.join(message.split())}"

    failure = classify_exit(1, f"{logged}\nTraceback (most recent call last):\n  File x\n{end}")
    assert failure.kind is FailureKind.BUG


@anything
@given(texts, st.sampled_from(["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGXCPU"]))
def test_stopped_programs_were_interrupted_whatever_they_printed(text, stop):
    assume(not KERNEL_OOM.words.search(text))  # which is evidence against the signal
    failure = classify_exit(-signal.Signals[stop], text)
    assert (failure.kind, failure.message) == (FailureKind.INTERRUPTED, f"ended by {stop}")
