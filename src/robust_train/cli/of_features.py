"""Commands that a feature answers."""

from __future__ import annotations

from argparse import Namespace

from robust_train.assembly import FEATURES
from robust_train.cli.command import Answer
from robust_train.model.errors import NotDoneError
from robust_train.model.feature import load_named


def answer(arguments: Namespace) -> Answer:
    """Return what the command's feature says."""
    command = arguments.command
    for feature in FEATURES:
        if command in feature.commands:
            data, lines = load_named(feature.commands[command])(arguments)
            return Answer(data, lines)
    raise NotDoneError(f"{command}: this installation is without the feature that answers it")
