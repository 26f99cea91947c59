"""The command line of ``robust-train COMMAND``: a mistake in it costs one line."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from robust_train.errors import EXIT_BAD_CONFIG


class Parser(argparse.ArgumentParser):
    """argparse's, which would print the usage before each of its errors."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and end with exit code 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
