"""Commands and variables as a file may show them: without secrets."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_MATTERS = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|OPENBLAS|HF|TRANSFORMERS|SLURM|XLA|TRITON|"
    r"ROBUST_TRAIN)_\w+|PYTHON\w+|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_DEFAULT_ENV"
)
_SECRET = re.compile(r"token|key|pass|pwd|secret|credential|auth|cookie|url|jwt", re.I)
# a password may have an @ of its own
_IN_URL = re.compile(r"(\w://)[^\s/\"']+@")
_NAME = (
    r"(?:token(?!s|iz)|(?:api|access|secret|private|auth|ssh|account|service|client|db|license)"
    r"[_-]?key|pass(?:word|wd|phrase|code)?(?![a-z])|pwd|secret|credential|auth(?!or(?!iz))|cookie"
    r"|jwt|dsn|webhook|ur[il](?![a-z])|notify)"
)
_NAMED = re.compile(_NAME, re.I)
# which is a secret in `wandb.key=…`, and a column of a table in `data.image_key=pixels`
_KEY = re.compile(r"(?<![a-z])key$", re.I)
_WORD = re.compile(r"[a-z][a-z_.]*", re.I)
# A number counts as a word too.
_PASSWORD = re.compile(
    r"passw|passphrase|passcode|pwd|secret|credential|(?:api|access|private)[_-]?key", re.I
)
_FLAG = re.compile(r"(?:true|false|null|none)", re.I)
_NUMBER = rf"(?:[-+]?[\d.]+(?:e[-+]?\d+)?|{_FLAG.pattern})"
_HARMLESS = re.compile(_NUMBER, re.I)
_INSIDE = re.compile(
    rf"{_NAME}[\w-]*[\"']?\s*[:=,](?!\s*{_NUMBER}\s*[\s,}}\]])"
    rf"|(?:{_PASSWORD.pattern})[\w-]*[\"']?\s*[:=,](?!\s*{_FLAG.pattern}\b)",
    re.I,
)
# where ranks meet, or a service is: no more than a host and a port
_ADDRESS = re.compile(r"\w+://[\w.:\[\]-]*/?|(?:file|sqlite)://[^@?]*")


def public_command(words: Sequence[str]) -> list[str]:
    """Return a command line, or overrides, without values whose name or form is that of a
    secret."""
    shown = []
    before = ""  # an option whose value is the next word
    for word in words:
        name, is_pair, value = word.partition("=")
        is_option = word.startswith("-")
        if before and not is_option and _is_named(before, word):
            shown.append("…")
        elif is_pair and (_is_named(name, value) or _holds_secret(value)):
            shown.append(f"{name}=…")
        elif not is_pair and _holds_secret(word):
            shown.append("…")
        else:
            shown.append(public_text(word))
        before = word if is_option and not is_pair else ""
    return shown


def _is_named(name: str, value: str) -> bool:
    """Return whether a value is a secret because of its name."""
    if _FLAG.fullmatch(value) or _ADDRESS.fullmatch(value):
        return False
    if _PASSWORD.search(name):
        return True
    if _HARMLESS.fullmatch(value):
        return False
    is_column = name.endswith("key") and _WORD.fullmatch(value) is not None
    is_key = _KEY.search(name) is not None and not is_column
    return is_key or _NAMED.search(name) is not None


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether an environment variable is a secret, by its name or its value."""
    is_named = _NAMED.search(name) is not None or _KEY.search(name) is not None
    return is_named or _holds_secret(value)


def _holds_secret(text: str) -> bool:
    """Return whether part of a text is named like a secret, or looks like a secret."""
    return bool(_INSIDE.search(text) or _forms().search(text))


@functools.cache
def _forms() -> re.Pattern[str]:
    """Return the pattern that finds a token by its form. Few commands need it, so it is read on
    demand."""
    lines = (Path(__file__).parent / "secrets.txt").read_text().splitlines()
    forms = [line for line in lines if line and not line.startswith("#")]
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(forms)})")


def public_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that matter to training, without secrets."""
    names = [
        name
        for name in filter(_MATTERS.fullmatch, environ)
        if not _SECRET.search(name) and not _forms().search(environ[name])
    ]
    return {name: public_text(environ[name]) for name in sorted(names)}


def public_text(text: str) -> str:
    """Return a text without credentials in URLs."""
    return _IN_URL.sub(r"\1…@", text)
