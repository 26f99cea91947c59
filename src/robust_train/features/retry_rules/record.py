"""The user's rule in the record of an attempt."""

from __future__ import annotations

from dataclasses import dataclass

from robust_train.model.attempt import Note


@dataclass(frozen=True)
class RuleNote(Note):
    """The user's rule that applies to a failure. In no file."""

    rule: int | None = None  # its number in `retry.rules`
