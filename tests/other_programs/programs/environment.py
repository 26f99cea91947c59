"""Everything in environment variables."""

import os

from learning import finish, save, trained

size = int(os.environ.get("BATCH_SIZE", "16"))
accumulate = int(os.environ.get("ACCUMULATE", "1"))
for step, weights in trained(os.environ.get("RESUME_FROM"), size, accumulate):
    save(f"{os.environ['OUTPUT']}/{step}.json", step, weights)
finish(weights)
