"""Everything in environment variables."""

import os

from learning import STEPS, finish, happens, load, one_step, save

size = int(os.environ.get("BATCH_SIZE", "16"))
accumulate = int(os.environ.get("ACCUMULATE", "1"))
first, weights = load(os.environ.get("RESUME_FROM"))
for step in range(first + 1, STEPS + 1):
    happens(step, size)
    weights = one_step(weights, step, size, accumulate)
    save(f"{os.environ['OUTPUT']}/{step}.json", step, weights)
finish(weights)
