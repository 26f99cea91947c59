"""Removes secrets from commands, environment variables and texts before a file shows them.

The launcher and the sweep use it for the files of the run folder, and commands for their output. A
value is a secret by its name (``wandb.key=…``), or by its form (``hf_…``, in ``secrets.txt``).
"""

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
# Credentials in a URL. They may contain an @ themselves.
_IN_URL = re.compile(r"(\w://)[^\s/\"']+@")
_NAME = (
    r"(?:token(?!s|iz)|(?:api|access|secret|private|auth|ssh|account|service|client|db|license)"
    r"[_-]?key|pass(?:word|wd|phrase|code)?(?![a-z])|pwd|secret|credential|auth(?!or(?!iz))|cookie"
    r"|jwt|dsn|webhook|ur[il](?![a-z])|notify)"
)
_NAMED = re.compile(_NAME, re.I)
# `wandb.key=…` holds a secret, but `data.image_key=pixels` names a column of a table.
_KEY = re.compile(r"(?<![a-z])key$", re.I)
_WORD = re.compile(r"[a-z][a-z_.]*", re.I)
# With these names even a number is a secret.
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
# An address without credentials, for example of a rendezvous or a database.
_ADDRESS = re.compile(r"\w+://[\w.:\[\]-]*/?|(?:file|sqlite)://[^@?]*")


def public_command(words: Sequence[str]) -> list[str]:
    """Return a command line, or overrides, with ``…`` in place of each secret."""
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
    """Return the pattern that recognises a token by its form. It is loaded only if needed."""
    lines = (Path(__file__).parent / "secrets.txt").read_text().splitlines()
    forms = [line for line in lines if line and not line.startswith("#")]
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(forms)})")


def public_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that matter to training, without secrets."""
    public: dict[str, str] = {}
    for name, value in sorted(environ.items()):
        is_secret = _SECRET.search(name) or _forms().search(value)
        if _MATTERS.fullmatch(name) and not is_secret:
            public[name] = public_text(value)
    return public


def public_text(text: str) -> str:
    """Return a text without the credentials in its URLs."""
    return _IN_URL.sub(r"\1…@", text)
