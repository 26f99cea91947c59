"""What every program here learns, and what happens to it on the way.

Plain Python, so that a program starts in no time and ends with the same digits everywhere.
"""

import json
import os
import signal
import time
from pathlib import Path

STEPS = 12
AT_STEP = 7
LARGEST_THAT_FITS = 8


def samples(step, count=16):
    """The samples of one optimizer step."""
    numbers = [(step * count + i) * 37 % 101 / 101 for i in range(count)]
    return [(x, 3 * x - 1) for x in numbers]


def gradient(weights, part):
    """The gradient of the mean squared error over some samples."""
    slope, offset = weights
    errors = [(slope * x + offset - y, x) for x, y in part]
    return [
        2 * sum(e * x for e, x in errors) / len(part),
        2 * sum(e for e, _ in errors) / len(part),
    ]


def stepped(weights, gradients, rate=0.1):
    return [w - rate * g for w, g in zip(weights, gradients, strict=True)]


def one_step(weights, step, size, accumulate=1):
    """One optimizer step over ``size × accumulate`` samples."""
    total = [0.0, 0.0]
    drawn = samples(step, size * accumulate)
    for first in range(0, len(drawn), size):
        part = gradient(weights, drawn[first : first + size])
        total = [t + g / accumulate for t, g in zip(total, part, strict=True)]
    return stepped(weights, total)


def trained(resume, size=16, accumulate=1):
    """Yield each step that is left, with the weights after it."""
    first, weights = load(resume)
    for step in range(first + 1, STEPS + 1):
        happens(step, size)
        weights = one_step(weights, step, size, accumulate)
        yield step, weights


def happens(step, size=1, events=("out of memory", "kill", "bug", "hang", "wait")):
    """Let happen what the test has in mind for this step."""
    event = os.environ.get("EVENT", "")
    if step < AT_STEP or event not in events:
        return
    if event == "out of memory":
        if size > LARGEST_THAT_FITS:
            raise MemoryError("no more")
        return
    if event == "bug":
        raise KeyError("learning_rte")
    ready = Path(os.environ["READY_FILE"])
    if ready.exists():  # happens once
        return
    ready.write_text(str(os.getpid()))
    if event in ("kill", "kill of a child"):
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.01)


def save(path, step, weights):
    """Write a checkpoint, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps({"step": step, "weights": weights}))
    unfinished.replace(path)


def load(path):
    """The step of a checkpoint, and its weights; a fresh start without one."""
    if not path:
        return 0, [0.0, 0.0]
    saved = json.loads(Path(path).read_text())
    return saved["step"], saved["weights"]


def finish(weights):
    print("result", *weights, flush=True)
