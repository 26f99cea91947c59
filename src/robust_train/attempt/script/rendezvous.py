"""Chooses a rendezvous for a script that starts several ranks.

The trainer behind ``trainer=command`` uses this in the attempt's process. torchrun's default port
is 29500, so two jobs on one machine would collide. With ``--standalone``, or the environment
variable ``PET_STANDALONE=1``, torchrun chooses a free port.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Commands that start ranks.
_TORCHRUN = re.compile(r"\btorchrun\b|torch\.distributed\.(?:run|launch)\b")
# Options and assignments in a command by which the user sets the rendezvous.
_ADDRESS = re.compile(
    r"--(?:standalone\b|rdzv[-_]|master[-_](?:addr|port)|main[-_]process[-_]|(?:node|machine)[-_]rank)"
    r"|--(?:nnodes|num[-_]machines)[ =](?!1(?::1)?(?!\S))"
    r"|\b(?:MASTER_|PET_)\w+="
)
# Variables by which the user sets the rendezvous.
_VARIABLES = re.compile(r"MASTER_(?:ADDR|PORT)|PET_(?:STANDALONE|NNODES|(?:RDZV|MASTER|NODE)_\w+)")


def rendezvous_environment(
    argv: Sequence[str], environ: Mapping[str, str], num_gpus: int
) -> dict[str, str]:
    """Return the variables that let torchrun choose a free port. The result is empty if the script
    does not start several ranks, or if the user has set the rendezvous."""
    words = " ".join(argv)
    has_ranks = num_gpus > 1 or _TORCHRUN.search(words) is not None
    if not has_ranks or _ADDRESS.search(words) is not None:
        return {}
    if any(_VARIABLES.fullmatch(name) for name in environ):
        return {}
    return {"PET_STANDALONE": "1"}
