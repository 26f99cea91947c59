"""Chooses a rendezvous for the ranks that a script starts.

The trainer behind ``trainer=command`` uses this in the attempt's process. torchrun's default port
is 29500, so two jobs on one machine collide. ``--standalone``, or the environment variable
that stands for it, makes torchrun choose a free port.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_TORCHRUN = re.compile(r"\btorchrun\b|torch\.distributed\.(?:run|launch)\b")
_ADDRESS = re.compile(
    r"--(?:standalone\b|rdzv[-_]|master[-_](?:addr|port)|main[-_]process[-_]|(?:node|machine)[-_]rank)"
    r"|--(?:nnodes|num[-_]machines)[ =](?!1(?::1)?(?!\S))"
    r"|\b(?:MASTER_|PET_)\w+="
)
_VARIABLES = re.compile(r"MASTER_(?:ADDR|PORT)|PET_(?:STANDALONE|NNODES|(?:RDZV|MASTER|NODE)_\w+)")


def rendezvous_environment(
    argv: Sequence[str], environ: Mapping[str, str], num_gpus: int
) -> dict[str, str]:
    """Return the variables by which torchrun chooses a free port. The result is empty if the script
    does not start several ranks, or if the user set the rendezvous."""
    words = " ".join(argv)
    has_ranks = num_gpus > 1 or _TORCHRUN.search(words) is not None
    if not has_ranks or _ADDRESS.search(words) is not None:
        return {}
    if any(map(_VARIABLES.fullmatch, environ)):
        return {}
    return {"PET_STANDALONE": "1"}
