"""Record how values of keys are refused: python tests/support/refused_values.py

``tests/recorded/refused_values.txt`` has overrides, joined by ``; ``, and below them the line that
refuses them. A new case is a line ``$ key=value`` there, and a recording; after a change of wording
that is meant, the difference is part of the review.
"""

from pathlib import Path

from omegaconf import OmegaConf

from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.model.errors import ConfigError

FILE = Path(__file__).parents[1] / "recorded" / "refused_values.txt"


def config_of(words):
    """Return the config of a job with these overrides."""
    return complete(OmegaConf.from_dotlist(words.split("; ") if words else []))


def refusal_of(words):
    """Return the line that refuses these overrides, or None."""
    try:
        checked(config_of(words))
    except ConfigError as error:
        return str(error)
    return None


def recorded():
    """Return pairs of overrides and the line that was recorded for them, empty for a new case."""
    pairs = []
    for case in FILE.read_text().removeprefix("$ ").split("\n$ "):
        words, _, line = case.partition("\n")
        pairs.append((words, line.strip("\n")))
    return pairs


def record():
    cases = [f"$ {words}\n{refusal_of(words)}\n" for words, _ in recorded()]
    FILE.write_text("\n".join(cases))


if __name__ == "__main__":
    record()
