"""Needs 8 MiB a sample and may have 160 MiB more than an idle interpreter."""

import resource
import sys
from pathlib import Path

MIB = 2**20
status = Path("/proc/self/status").read_text()
in_use = int(next(line for line in status.splitlines() if "VmData" in line).split()[1]) * 1024
limit = in_use + 160 * MIB
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

batch_size = int(sys.argv[sys.argv.index("--batch_size") + 1])
accumulate = int(sys.argv[sys.argv.index("--accumulate") + 1])
batch = bytearray(batch_size * 8 * MIB)
print(f"trained {batch_size} x {accumulate}")
