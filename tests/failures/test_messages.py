"""The labelled table of real messages: what each of them is, however it arrives."""

import itertools
import re
from collections import Counter

from failures.messages import CASES, raised
from robust_train.failures import classify_exit, classify_failure
from robust_train.model.failure import FailureKind

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


def test_each_real_message_is_what_it_is():
    found = {case: classified(case) for case in CASES}
    assert [case for case, one in found.items() if one.kind.value != case.kind] == []
    assert [case for case, one in found.items() if case.clue not in ("", one.evidence.clue)] == []
    assert [case for case, one in found.items() if "\n" in one.message] == []


def test_the_table_is_large_and_has_no_message_twice():
    count = Counter(case.kind for case in CASES)
    assert len(CASES) >= 1500
    assert set(count) == {kind.value for kind in FailureKind} - {"unknown", "diverged"}
    assert count["bug"] >= 340
    assert count["device_oom"] >= 240
    assert len({(case.raised_by, case.message) for case in CASES}) == len(CASES)


def other_kinds(cases, at_least=0):
    """Those of these errors, given with their cases, that are taken for something else."""
    assert len(cases) > at_least
    return [
        f"{case}: {case.kind} became {found}, {case.message[:80]}"
        for case, error in cases
        if (found := classify_failure(error).kind.value) != case.kind
    ]


def test_a_rank_before_the_message_changes_nothing():
    prefixes = ("[rank3]: ", "[default0]:", "(RayTrainWorker pid=7123) ", "[1,0]<stderr>: ")
    prefixed = [
        (case, raised(case.raised_by, prefix + case.message))
        for case, prefix in zip(RAISED, itertools.cycle(prefixes), strict=False)
        if case.message and case.raised_by != "SystemExit" and "[Errno" not in case.message
    ]
    assert other_kinds(prefixed, 500) == []


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
    assert other_kinds(changed, 120) == []


def test_an_error_raised_for_another_is_of_the_first_ones_kind():
    links = itertools.cycle(["__cause__", "__context__"])

    def wrapped(case):
        outer = RuntimeError("training failed")
        setattr(outer, next(links), case.exception())
        return outer

    assert other_kinds([(case, wrapped(case)) for case in RAISED]) == []


def quotable():
    """Cases whose message is no traceback by itself, as the last lines of one."""
    return [
        (case, f"{name}: {case.message}" if case.message else name)
        for case in RAISED
        if "Traceback" not in case.message
        and not case.message.startswith("\n")
        and (name := case.raised_by.partition("(")[0]) != "SystemExit"
    ]


def test_a_workers_traceback_tells_as_much_as_the_error_itself():
    told = f"Caught it in DataLoader worker process 0.\nOriginal {TRACEBACK}"
    assert other_kinds([(case, RuntimeError(told + end)) for case, end in quotable()], 500) == []


def test_a_log_that_ends_in_a_traceback_tells_as_much_as_the_error_itself():
    wrong = []
    prefixes = itertools.cycle(["", "[rank1]: ", "(TrainWorker pid=77) "])
    for (case, end), prefix in zip(quotable(), prefixes, strict=False):
        lines = f"epoch 1\n{TRACEBACK}{end}".splitlines()
        found = classify_exit(1, "\n".join(prefix + line for line in lines)).kind.value
        if found != case.kind:
            wrong.append(f"{case}: {case.kind} became {found}")
    assert wrong == []


def test_what_torch_appends_to_each_cuda_error_is_no_device_side_assert():
    appended = [
        (case, raised(case.raised_by, case.message + APPENDIX))
        for case in RAISED
        if case.message.startswith(("CUDA error", "CUDA driver error"))
        and APPENDIX.split("`")[1] not in case.message
    ]
    assert other_kinds(appended, 40) == []
