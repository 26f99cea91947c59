"""The end of what a program printed: what lies below an error, and how it is laid out."""

import inspect
import json
import textwrap
import time
import traceback

import pytest

from robust_train.failures import classify_exit, classify_failure
from robust_train.failures.memory_messages import find_last_shortage
from robust_train.launcher.script_output import find_doubt
from robust_train.model import errors
from robust_train.model.attempt import Attempt
from robust_train.model.events import ScriptEnded
from robust_train.model.exit import Exit
from robust_train.model.failure import Clue, FailureKind
from robust_train.model.spec import AttemptSpec

GIB = 1 << 30
WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.78 GiB of "
    "which 1.20 GiB is free."
)
ROW = "| Allocated memory {0:4d} |      343 MB |      441 MB |        |\n"
TABLE = "".join(map(ROW.format, range(80)))
CONFIG = "Namespace(batch=8, epochs=3)\nlr: 0.1\nepoch: 3\nbatch: 8\nsteps: 100\n"
STEPS = "".join(f"step {number} loss {1 / (number + 1):.4f}\n" for number in range(200))
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
LOGGED = {
    "a warning": f"2021-08-02 18:54:21 | WARNING | trainer | OOM: Ran out of memory: {WORDS}\n",
    "an error": f"2021-08-02 | ERROR | trainer | {WORDS}\n",
    "a plain line": f"{WORDS}\n",
    "with words of no library": "Epoch 3: not enough memory on the GPU, giving up\n",
    "an exception without a message": "ERROR training failed: OutOfMemoryError()\n",
    "a record in JSON": json.dumps(
        {"level": "error", "exc_info": f"{TRACEBACK}    step()\ntorch.OutOfMemoryError: {WORDS}"}
    )
    + "\n",
}


@pytest.mark.parametrize("line", LOGGED.values(), ids=LOGGED)
@pytest.mark.parametrize("below", ["", "done\n", TABLE, TABLE + CONFIG], ids=len)
def test_a_shortage_is_found_in_any_line(line, below):
    """It does not matter what was printed below it."""
    assert classify_exit(1, STEPS[:1000] + line + below).kind is FailureKind.DEVICE_OOM


OTHERS = {
    "handled long before": f"{WORDS}\n{STEPS}",
    "handled in words": f"WARNING: {WORDS} Skipping this batch\nbad checkpoint\n",
    "a warning before another error": f"WARNING {WORDS}\nOSError: cannot open shard 3\n",
    "a smaller batch": "WARNING not enough memory, using batch-size 16\nbad checkpoint\n",
    "a table without one": "|   CUDA OOMs: 0   |   cudaMalloc retries: 3   |\n" + TABLE,
    "figures without one": f"GPU out of memory errors: 0\n{CONFIG}",
    "a remark": f"INFO: not enough memory for the cache, reading from disk\n{CONFIG}",
    "another error since": f"ERROR: {WORDS}\nKeyError: 'labels'\n{TABLE}",
    "a traceback of something else": f"{WORDS}\n{TABLE}{TRACEBACK}KeyError: 'labels'\n",
}


@pytest.mark.parametrize("output", OTHERS.values(), ids=OTHERS)
def test_only_shortages_at_the_end_lower_the_batch(output):
    assert classify_exit(1, output).kind is FailureKind.BUG


def test_an_end_that_shows_nothing_says_so():
    message = "ended with exit code 1; the end of its output shows no reason"
    assert classify_exit(1, TABLE).message == message
    assert classify_exit(1, "").message == "ended with exit code 1"
    # what is far above the end of the output, which is short, is looked up in the log
    assert WORDS in find_last_shortage(f"{LOGGED['a warning']}{TABLE * 40}")
    assert find_last_shortage(f"{LOGGED['a warning']}{STEPS}{TABLE * 40}") == ""


ENDLESS = {
    "a line of dotted names": "a.b.".__mul__,
    "a line of blanks": lambda count: f"{' ' * count}!",
}


@pytest.mark.parametrize("printed", ENDLESS.values(), ids=ENDLESS)
def test_a_long_log_is_searched_linearly(printed):
    """Four times as much of it takes about four times the work, not sixteen times."""

    def work(count):
        log = printed(count)
        began = time.process_time()
        assert find_last_shortage(log) == ""
        return time.process_time() - began

    find_last_shortage(printed(100))
    assert work(16_000) < 8 * work(4_000) + 0.05


def test_a_hundred_messages_are_looked_at(monkeypatch):
    """However often a loader has printed that it failed to read a file."""
    looked_at = []
    monkeypatch.setattr("robust_train.failures.memory_messages.find_match", looked_at.append)

    def work(lines):
        looked_at.clear()
        unread = (f"WARNING: failed to read image {number}.jpg\n" for number in range(lines))
        find_last_shortage("".join(unread))
        return len(looked_at)

    assert 0 < work(50) < work(150) == work(600)


def test_a_shortage_is_found_around_endless_lines():
    noise = "a.b." * 10_000
    assert WORDS in find_last_shortage(f"{noise}\n{WORDS}\n{noise}\n")


def boxed(text, width, title="", frame="│╭╮╰╯─"):
    """A text as rich draws it in a panel."""
    side, left, right, low_left, low_right, rule = frame
    head = f" {title} ".center(width - 2, rule) if title else rule * (width - 2)
    parts = [line for part in text.splitlines() for line in textwrap.wrap(part, width - 4)]
    lines = [f"{side} {part:{width - 4}} {side}" for part in parts]
    box = [f"{left}{head}{right}", *lines, f"{low_left}{rule * (width - 2)}{low_right}"]
    return "\n".join(box) + "\n"


def logged_in_columns(text, width):
    """A text as rich's log handler writes it: the place of the call is at the right."""
    first, *rest = (f"{part:{width}}" for part in textwrap.wrap(text, width))
    lines = [f"[18:54:21] ERROR    {first}  train.py:12"]
    return "\n".join(lines + [f"{'':20}{part}{'':13}" for part in rest]) + "\n"


INDENTED = WORDS.replace(". ", ".\n       ")
BROKEN = "\n".join(WORDS[at : at + 60] for at in range(0, len(WORDS), 60))
LAYOUTS = {
    "a panel": boxed(WORDS, 40, "Error"),
    "a narrow panel": boxed(WORDS, 24),
    "a panel in a panel": boxed(boxed(WORDS, 40, "Error"), 44),
    "a panel of ASCII": boxed(WORDS, 40, "Error", "|++++-"),
    "stars": boxed(WORDS, 40, "Error", "******"),
    "hashes": boxed(WORDS, 40, "", "######"),
    "stars at the left": "*" * 40 + "\n" + textwrap.indent(textwrap.fill(WORDS, 36), "*  ") + "\n",
    "a line between hashes": f"### {WORDS} ###\n",
    "a log handler": logged_in_columns(WORDS, 16),
    "indented lines": f"ERROR {INDENTED}\n",
    "broken within words": f"{BROKEN}\n",
}


@pytest.mark.parametrize("output", LAYOUTS.values(), ids=LAYOUTS)
def test_a_boxed_message_is_read_whole(output):
    """Without its frame, also if it is wrapped."""
    failure = classify_exit(1, f"{CONFIG}{output}{TABLE}")
    assert failure.kind is FailureKind.DEVICE_OOM
    figures = failure.evidence
    assert (figures.requested_bytes, figures.free_bytes) == (2 * GIB, int(1.2 * GIB))
    assert not set("│|╭╰*#") & set(failure.message)


@pytest.mark.parametrize("frame", ["│╭╮╰╯─", "******", "######"])
def test_another_errors_box_loses_its_frame(frame):
    output = boxed("Cannot open the archive: checksum differs", 30, "Error", frame)
    message = "ended with exit code 1: Cannot open the archive: checksum differs"
    assert classify_exit(1, output).message == message


def test_a_message_wrapped_by_rich_is_whole():
    """It stands below a traceback."""
    frames = boxed("train.py:3 in <module>", 50, "Traceback (most recent call last)")
    words = "OSError: the shard that holds the labels has another length than its index"
    output = frames + textwrap.fill(words, 50) + "\n"
    assert classify_exit(1, output).message == f"ended with exit code 1: {words}"


PRAISE = "wandb: View run at https://example.org\nTraining is done and the best AP is 0.00\n"
DOUBTED = {
    "a bug below which a line follows": (f"{TRACEBACK}KeyError: 'x'\n{PRAISE}", "KeyError: 'x'"),
    "a shortage": (f"{TRACEBACK}RuntimeError: {WORDS}\n{PRAISE}", WORDS),
    "a logged shortage": (f"{LOGGED['a warning']}{TABLE}", "CUDA out of memory"),
    "a bug after some steps": (f"{STEPS}{TRACEBACK}KeyError: 'x'\n{PRAISE}", "KeyError: 'x'"),
    "a shortage that was handled": (f"{TRACEBACK}RuntimeError: {WORDS}\n{STEPS}{PRAISE}", ""),
    "a bug that was handled": (f"{TRACEBACK}KeyError: 'x'\n{STEPS}", ""),
    "an error that Python ignored": (
        f"Exception ignored in: <function f>\n{TRACEBACK}KeyError: 'x'\n",
        "",
    ),
    "a loss that is not a number": ("epoch 1: loss 0.31\nepoch 2: loss nan\nsaved\n", "is nan"),
    "an infinite loss in a record": (f"{STEPS}{{'loss': inf, 'step': 7}}\n", "is inf"),
    "a loss that became finite": ("epoch 1: loss nan\nepoch 2: loss 0.5\nloss information\n", ""),
    "nothing": (f"{STEPS}{PRAISE}{TABLE}", ""),
}


@pytest.mark.parametrize(("output", "shown"), DOUBTED.values(), ids=DOUBTED)
def test_exit_0_after_a_final_error_is_doubted(output, shown):
    """The error is the last thing that happened."""
    attempt = Attempt(1, AttemptSpec((), 8, 1), script=ScriptEnded(0, 1), exit=Exit(output=output))
    doubt = find_doubt(attempt)
    if shown:
        assert shown in doubt
    else:
        assert doubt is None


class Odd(Exception):
    """An exception of a program's own."""


class Derived(KeyError):
    """An error of a program's own that is a missing key."""


CERTAIN = (
    SyntaxError("invalid syntax"),
    NameError("name 'x' is not defined"),
    ImportError("cannot import name 'x'"),
    ModuleNotFoundError("No module named 'x'"),
    AttributeError("'x' has no attribute 'y'"),
    TypeError("unsupported operand"),
    KeyError("x"),
    IndexError("list index out of range"),
    AssertionError("shapes"),
    ValueError("labels are not what they should be"),
    ZeroDivisionError("division by zero"),
    NotImplementedError("later"),
)
UNKNOWN = (
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    OSError("odd"),
    FileNotFoundError(2, "No such file or directory", "shard-7.tar"),
    PermissionError(13, "Permission denied", "shard-7.tar"),
    EOFError("odd"),
    Odd("odd"),
    Exception(),
)


@pytest.mark.parametrize("error", [*CERTAIN, Derived("x"), *UNKNOWN], ids=repr)
def test_program_bugs_differ_from_unnamed_failures(error):
    """However the failure arrives; of a process only the names are known, not the bases."""
    clue = Clue.UNKNOWN if error in UNKNOWN else None
    failure = classify_failure(error)
    assert (failure.kind, failure.evidence.clue) == (FailureKind.BUG, clue)
    if isinstance(error, Derived):
        return
    printed = f"{TRACEBACK}{type(error).__name__}: {error}\n"
    shown = classify_exit(1, f"{STEPS}{printed}")
    assert (shown.kind, shown.evidence.clue) == (FailureKind.BUG, clue)
    linked = f"{printed}\nThe above exception was the direct cause of the following exception:\n\n"
    led_to = classify_exit(1, f"{linked}{TRACEBACK}RuntimeError: training failed\n")
    assert led_to.evidence.clue == clue
    outer = RuntimeError("training failed")
    outer.__cause__ = error
    assert classify_failure(outer).evidence.clue == clue


def test_our_errors_are_no_other_failure():
    """Their names have words that libraries of the network give to theirs."""
    ours = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    end = TRACEBACK + f"{errors.__name__}."
    kinds = {name: classify_exit(1, f"{end}{name}: x\n").kind for name in ours}
    assert {name for name, kind in kinds.items() if kind is not FailureKind.BUG} == set()
    assert "RunFolderLostError" in kinds


def test_an_exit_code_without_a_reason_is_unknown():
    for code in (3, "no luck"):
        assert classify_failure(SystemExit(code)).evidence.clue == Clue.UNKNOWN
    assert classify_failure(SystemExit(0)).evidence.clue is None
    assert classify_exit(3, STEPS).evidence.clue == Clue.UNKNOWN
    assert classify_exit(-6, STEPS).evidence.clue == Clue.UNKNOWN
    assert classify_exit(-11, STEPS).evidence.clue == Clue.CRASHED


@pytest.mark.parametrize("is_raised_from", [True, False])
@pytest.mark.parametrize("error_type", [ValueError, KeyError, AssertionError])
def test_a_printed_chain_reads_as_its_exception(error_type, is_raised_from):
    """Whether a program ends with an error or the launcher catches it makes no difference."""
    outer = error_type("odd")
    try:
        try:
            raise MemoryError("Unable to allocate 2.00 GiB")
        except MemoryError as cause:
            outer.__cause__ = cause if is_raised_from else None
            outer.__suppress_context__ = is_raised_from
            raise outer  # noqa: B904
    except Exception as error:
        caught = classify_failure(error)
        printed = "".join(traceback.format_exception(error))
    shown = classify_exit(1, f"{STEPS}{printed}")
    assert (shown.kind, shown.evidence) == (caught.kind, caught.evidence)
    assert is_raised_from <= (caught.kind is FailureKind.HOST_OOM)
