"""Prints torch's words for a GPU without memory where the batch is above the GPU's budget."""

import contextlib
import json
import os
import sys
from pathlib import Path

gpu = os.environ["CUDA_VISIBLE_DEVICES"] or "cpu"
batch_size = int(sys.argv[1])
open_files = []
for descriptor in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):  # of the listing itself
        open_files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
with Path(os.environ["ATTEMPTS_FILE"]).open("a") as file:
    held = any("/record." in target for target in open_files)
    file.write(json.dumps([gpu, sys.argv[2], batch_size, held]) + "\n")
if batch_size > json.loads(os.environ["BATCH_BUDGETS"]).get(gpu, 10**9):
    sys.exit(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 15.78 GiB of which 1.20 GiB is free."
    )
