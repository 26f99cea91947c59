"""Search for a user's pattern without ever hanging: some take exponential time."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys

log = logging.getLogger("robust_train")

LIMIT_SECONDS = 5.0
_SEARCH = """
import re, sys
pattern, text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass").split("\\0", 1)
print(bool(re.search(pattern, text, re.MULTILINE)))
"""


@functools.lru_cache(maxsize=64)
def is_found(pattern: str, text: str) -> bool:
    """Return whether the pattern is in the text. In a process of its own, which is killed after
    some seconds: a search in this one can neither be interrupted nor left behind by a thread."""
    given = f"{pattern}\0{text}".encode("utf-8", "surrogatepass")
    try:
        found = subprocess.run(
            (sys.executable, "-I", "-S", "-c", _SEARCH),
            input=given,
            capture_output=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        why = f"it takes more than {LIMIT_SECONDS:g} s here (nested repetition, as in (a+)+)"
    except OSError as error:
        why = str(error.strerror)
    else:
        return found.stdout.strip() == b"True"
    log.warning("retry.rules: message %s does not count: %s", pattern, why)
    return False
