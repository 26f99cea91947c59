"""The note of the user rule that applies to a failure."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Note


@dataclass(frozen=True)
class RuleNote(Note):
    """The user rule that applies to a failure. Not written to any file."""

    rule: int | None = None  # its number in `retry.rules`
