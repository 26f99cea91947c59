"""What the record of an attempt says of the user's rules."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Note


@dataclass(frozen=True)
class RuleNote(Note):
    """Which of the user's rules applies to a failure; in no file."""

    rule: int | None = None  # its number in `retry.rules`
