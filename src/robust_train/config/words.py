"""Rewords messages so that they name config keys as the user writes them.

This package's code writes ``training.batch_size=8`` in every message. In a Hydra project, the
user's key may be ``data.batch_size``. So the launcher and the attempts let `Words` reword log
lines, errors and decisions when these leave the package: in the log handler, in the run folder, and
in exceptions.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from robust_train.config.keys import schema
from robust_train.config.projects import GROUP
from robust_train.config.schema import ACCUMULATION, BATCH, WORKERS
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoDeviceError, UserError
from robust_train.model.spec import Decision, Retry

# The English names of keys that a project's config may not have.
_IN_WORDS = {
    BATCH: "batch size",
    ACCUMULATION: "gradient accumulation",
    WORKERS: "data-loader workers",
}


@dataclass(frozen=True)
class Words:
    """Rewords messages for one job.

    Attributes:
        theirs: the project's key for each of our keys (`their_keys`). None if the config has our
            keys at its root, so that messages stay as they are.
    """

    theirs: Mapping[str, str] | None

    @property
    def for_log(self) -> Callable[[str], str] | None:
        """A function that rewords a line of the log, or None if lines stay as they are."""
        return None if self.theirs is None else self.reword

    @contextlib.contextmanager
    def rewording_errors(self) -> Iterator[None]:
        """Reword the error if the block raises an error that ends a job."""
        try:
            yield
        except (ConfigError, NoDeviceError, UserError) as error:
            error.args = (self.reword(str(error)),)
            raise

    def reword(self, text: str, quoted: str = "") -> str:
        """Reword a message, except for the part ``quoted``, which this package did not write."""
        theirs = self.theirs
        if theirs is None:
            return text
        if quoted:
            parts = [self.reword(part) for part in text.split(quoted)]
            return quoted.join(parts)

        def replace_key(match: re.Match[str]) -> str:
            key = match[0]
            their_key = theirs.get(key)
            if their_key:
                return their_key
            our_key = f"{GROUP}.{key}"
            # A key that the project does not have gets its English name, except in `key=value`.
            is_set = text[match.end() :].startswith("=")
            return our_key if is_set else _IN_WORDS.get(key, our_key)

        return _key_pattern().sub(replace_key, text)

    def reword_decision(self, decision: Decision, quoted: str = "") -> Decision:
        """Reword a decision. ``quoted`` is the failure's message."""
        if isinstance(decision, Retry):
            return self._reword_retry(decision, quoted)
        return replace(decision, reason=self.reword(decision.reason, quoted))

    def _reword_retry(self, retry: Retry, quoted: str) -> Retry:
        otherwise = retry.otherwise
        if otherwise is not None:
            otherwise = self.reword_decision(otherwise, quoted)
        return replace(
            retry,
            reason=self.reword(retry.reason, quoted),
            warning=self.reword(retry.warning, quoted),
            otherwise=otherwise,
        )

    def reword_attempt(self, attempt: Attempt) -> Attempt:
        """Reword the advice of an attempt, and its message if this package wrote it."""
        failure = attempt.failure
        if failure is None or self.theirs is None:
            return attempt
        message = failure.message
        if failure.evidence.library == "robust_train":
            message = self.reword(message)
        advice = tuple(self.reword(sentence) for sentence in failure.advice)
        return replace(attempt, failure=replace(failure, message=message, advice=advice))


@cache
def _key_pattern() -> re.Pattern[str]:
    """Return a pattern for our keys in messages.

    A key that is also an English word matches only as ``key=``. Nothing matches within a
    placeholder, a path or a longer key.
    """
    patterns = []
    for name in schema().root.names():
        # In these groups, any key may be the user's own.
        if name.startswith(("model.", "dataset.")):
            continue
        is_english_word = re.search("[._]", name) is None
        patterns.append(re.escape(name) + ("(?==)" if is_english_word else ""))
    return re.compile(rf"(?<![\w./=-])(?<!(?<!\$)\{{)(?:{'|'.join(patterns)})\b")
