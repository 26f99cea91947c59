"""The labelled table of real messages: what becomes of a job with each of them, however it arrives.

What counts is not the kind's name but the decision after it: the job gets more memory, continues,
or ends. A bug that nobody can name may continue once from a checkpoint.
"""

import functools
import itertools
import re
from collections import Counter

import pytest

from attempts import decided, failed, gpu, policy
from failures.messages import CASES, raised
from robust_train.failures import classify_exit, classify_failure
from robust_train.failures.error_reports import CERTAIN_BUGS
from robust_train.model.failure import Clue, Evidence, FailureKind
from robust_train.model.spec import GiveUp
from robust_train.policy.decide import first_attempt

RAISED = [case for case in CASES if not case.is_exit]
TRACEBACK = "Traceback (most recent call last):\n" + '  File "train.py", line 3, in <module>\n'
# what torch appends to each error of CUDA, on lines of their own
APPENDIX = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def classified(case):
    if case.is_exit:
        return classify_exit(case.returncode, case.message)
    return classify_failure(case.exception())


SETTINGS = policy(64, num_workers=4, min_batch_size=8)
GPUS = (gpu(0, 20), gpu(1, 20))
LOWERS_MEMORY = ("halve_batch", "fewer_workers", "expandable_segments")


@functools.cache
def outcome(kind, clue):
    """What becomes of a job that has saved a checkpoint and then fails so."""
    saved = {"end_step": 9, "saved_step": 8, "saves": 1, "checkpoint": "8.pt"}
    evidence = Evidence(clue=clue)
    spec = first_attempt(SETTINGS, GPUS[:1])
    attempt = failed(spec, FailureKind(kind), evidence, **saved)
    decision = decided(SETTINGS, (attempt,), GPUS)
    if isinstance(decision, GiveUp):
        return "ends"
    if decision.action in LOWERS_MEMORY:
        return "lowers memory"
    return "leaves the GPU" if decision.spec.gpus != spec.gpus else "continues"


def is_wrong(case, failure):
    """Whether the job would do something else than the failure's label demands."""
    clue = failure.evidence.clue
    does = outcome(failure.kind.value, clue)
    if case.kind == "bug" and clue == Clue.UNKNOWN:
        is_certain = case.raised_by.rpartition(".")[2] in CERTAIN_BUGS
        return is_certain or does != "continues"
    label = case.clue or (clue if clue != Clue.UNKNOWN else None)
    return does != outcome(case.kind, label)


def test_a_job_does_what_each_real_message_demands():
    failures = {case: classified(case) for case in CASES}
    assert [case for case, failure in failures.items() if is_wrong(case, failure)] == []
    outcomes = (outcome(each.kind.value, each.evidence.clue) for each in failures.values())
    done = Counter(outcomes)
    assert min(done.values()) >= 20, done
    unknown = [failure for failure in failures.values() if failure.evidence.clue == Clue.UNKNOWN]
    assert len(unknown) >= 100
    assert [case for case in CASES if case.clue not in ("", failures[case].evidence.clue)] == []
    assert [case for case, failure in failures.items() if "\n" in failure.message] == []


def test_the_table_is_large_and_without_duplicates():
    count = Counter(case.kind for case in CASES)
    assert len(CASES) >= 1500
    assert set(count) == {kind.value for kind in FailureKind} - {"unknown", "diverged"}
    assert count["bug"] >= 340
    assert count["device_oom"] >= 240
    assert len({(case.raised_by, case.message) for case in CASES}) == len(CASES)


def wrong_outcomes(cases, at_least=0):
    """Those of these errors, given with their cases, after which a job does something else."""
    assert len(cases) > at_least
    return [
        f"{case}: {case.kind} became {failure.kind.value}, {case.message[:80]}"
        for case, error in cases
        if is_wrong(case, failure := classify_failure(error))
    ]


def test_a_rank_before_the_message_changes_nothing():
    prefixes = ("[rank3]: ", "[default0]:", "(RayTrainWorker pid=7123) ", "[1,0]<stderr>: ")
    prefixed = [
        (case, raised(case.raised_by, prefix + case.message))
        for case, prefix in zip(RAISED, itertools.cycle(prefixes), strict=False)
        if case.message and case.raised_by != "SystemExit" and "[Errno" not in case.message
    ]
    assert wrong_outcomes(prefixed, 500) == []


def test_other_sizes_and_gpu_numbers_change_nothing():
    def varied(message):
        message = re.sub(r"\bGPU \d+", "GPU 13", message)
        message = re.sub(r"\d+(?:\.\d+)? (?=[KMGT]i?B)", "1023.99 ", message)
        return re.sub(r"\d{6,}", "123456789012", message)

    changed = [
        (case, raised(case.raised_by, varied(case.message)))
        for case in RAISED
        if varied(case.message) != case.message
    ]
    assert wrong_outcomes(changed, 120) == []


@pytest.mark.slow
def test_the_first_errors_kind_counts():
    """The later error was raised because of it."""
    links = itertools.cycle(["__cause__", "__context__"])

    def wrapped(case):
        outer = RuntimeError("training failed")
        # an error of the program's that is being handled may have been expected
        link = "__cause__" if case.kind == "bug" else next(links)
        setattr(outer, link, case.exception())
        return outer

    assert wrong_outcomes([(case, wrapped(case)) for case in RAISED]) == []


def quotable():
    """Cases whose message is not itself a traceback, each as the last line of a traceback."""
    return [
        (case, f"{name}: {case.message}" if case.message else name)
        for case in RAISED
        if "Traceback" not in case.message
        and not case.message.startswith("\n")
        and (name := case.raised_by.partition("(")[0]) != "SystemExit"
    ]


@pytest.mark.slow
def test_a_workers_traceback_tells_as_much_as_errors():
    """It arrives as text."""
    told = f"Caught it in DataLoader worker process 0.\nOriginal {TRACEBACK}"
    assert wrong_outcomes([(case, RuntimeError(told + end)) for case, end in quotable()], 500) == []


def test_a_logged_traceback_tells_as_much_as_errors():
    """It is at the end of a log."""
    wrong = []
    prefixes = itertools.cycle(["", "[rank1]: ", "(TrainWorker pid=77) "])
    for (case, end), prefix in zip(quotable(), prefixes, strict=False):
        lines = f"epoch 1\n{TRACEBACK}{end}".splitlines()
        failure = classify_exit(1, "\n".join(prefix + line for line in lines))
        if is_wrong(case, failure):
            wrong.append(f"{case}: {case.kind} became {failure.kind.value}")
    assert wrong == []


def test_cuda_boilerplate_is_no_device_side_assert():
    """torch appends these words to each CUDA error."""
    appended = [
        (case, raised(case.raised_by, case.message + APPENDIX))
        for case in RAISED
        if case.message.startswith(("CUDA error", "CUDA driver error"))
        and APPENDIX.split("`")[1] not in case.message
    ]
    assert wrong_outcomes(appended, 40) == []
