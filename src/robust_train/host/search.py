"""Search by a pattern of the user's, which may take hours: in a process with a time limit."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys

log = logging.getLogger("robust_train")

LIMIT_SECONDS = 5.0
SEARCH = """
import json, re, sys
pattern, text = json.load(sys.stdin)
print(bool(re.search(pattern, text, re.MULTILINE)))
"""


@functools.lru_cache(maxsize=64)
def is_found(pattern: str, text: str) -> bool:
    """Return whether the pattern is in the text. False, after a warning, if the search takes too
    long."""
    command = (sys.executable, "-I", "-S", "-c", SEARCH)
    given = json.dumps([pattern, text]).encode()
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=LIMIT_SECONDS)
        if done.returncode == 0:
            return done.stdout.strip() == b"True"
        why = f"its process ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        why = f"it takes more than {LIMIT_SECONDS:g} s, as nested repetition like (a+)+ does"
    except OSError as error:
        why = str(error)
    log.warning("retry.rules: message %s is skipped: %s", pattern, why)
    return False
