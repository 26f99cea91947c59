"""Searches a text for a user's regular expression, with a time limit.

A pattern such as ``(a+)+b`` can take hours, and Python cannot interrupt a search. So the launcher,
which matches ``retry.rules`` against a failure's message, runs each search in a child process.
"""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys

log = logging.getLogger("robust_train")

LIMIT_SECONDS = 5.0
# The child process's program. It reads the pattern and the text from standard input.
SEARCH = """
import json, re, sys
pattern, text = json.load(sys.stdin)
print(bool(re.search(pattern, text, re.MULTILINE)))
"""


@functools.lru_cache(maxsize=64)
def is_found(pattern: str, text: str) -> bool:
    """Return whether the pattern is in the text. If the search takes too long or fails, warn and
    return False."""
    command = (sys.executable, "-I", "-S", "-c", SEARCH)
    request = json.dumps([pattern, text]).encode()
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=LIMIT_SECONDS)
        if done.returncode == 0:
            return done.stdout.strip() == b"True"
        why = f"the search process ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        why = (
            f"the search took more than {LIMIT_SECONDS:g} s, "
            "perhaps because of nested repetition such as (a+)+"
        )
    except OSError as error:
        why = str(error)
    log.warning("retry.rules: message %s is skipped: %s", pattern, why)
    return False
