"""Runs the commands that belong to a feature, such as ``need``, in the command's process.

The table of commands names `answer`, so that a command does not depend on its feature's folder.
"""

from __future__ import annotations

from argparse import Namespace

from robust_train.assembly import FEATURES
from robust_train.cli.command import Answer
from robust_train.model.errors import NotDoneError
from robust_train.model.feature import load_named


def answer(arguments: Namespace) -> Answer:
    """Return the answer of the feature that has the command."""
    command = arguments.command
    for feature in FEATURES:
        if command in feature.commands:
            run_command = load_named(feature.commands[command])
            data, lines = run_command(arguments)
            return Answer(data, lines)
    raise NotDoneError(f"{command}: this installation lacks the feature with this command")
