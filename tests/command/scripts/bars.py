"""Progress bars and colours, then an error in colours, as Python 3.13 prints on a terminal."""

import os
import sys

print("\x1b[32mterminal\x1b[0m" if all(map(os.isatty, range(3))) else "pipe", flush=True)
if os.isatty(0):  # as some ask at import; what people type is not for a script
    print(os.get_terminal_size(0).columns, "columns", repr(sys.stdin.readline()), flush=True)
for percent in range(0, 101, 20):
    sys.stderr.write(f"\r{percent:3d}%|{'#' * (percent // 10)}")
sys.stderr.write("\n")
if "fails" in sys.argv:
    sys.stderr.write(
        "Traceback (most recent call last):\n"
        '  File \x1b[35m"train.py"\x1b[0m, line \x1b[35m3\x1b[0m, in \x1b[35m<module>\x1b[0m\n'
        "\x1b[1;35mMemoryError\x1b[0m: \x1b[35mno more\x1b[0m\n"
    )
    sys.exit(1 if os.environ["ROBUST_TRAIN_BATCH_SIZE"] == "64" else 0)
