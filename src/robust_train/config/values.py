"""Declares config keys, and checks and converts their values.

``config/schema.py`` and the features' ``model.py`` declare their keys with :func:`key`. Every
process that reads a config calls :meth:`Declaration.value` for each key. Some keys accept several
types, and name one of the functions below as ``read``, which converts a value to the type of the
code.
Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from robust_train.model.errors import ConfigError

AUTO = "auto"

EVENTS = ("completed", "failed", "interrupted", "cpu", "waiting", "slow", "stalled", "disk")
"""The values of ``notify.on``."""

CLEARED_AFTER = ("save", "epoch", "failure")
"""The values of ``memory.clear_after``."""

URLS_VARIABLE = "ROBUST_TRAIN_NOTIFY_URLS"
"""The variable with the URLs of ``notify.urls``, which may contain passwords."""

SET_FOR_HYDRA_VARIABLE = "ROBUST_TRAIN_SET_FOR_HYDRA"
"""The variable that lists the variables that a command set for its own Hydra. They are removed from
the environment of attempts, whose program may use Hydra itself."""


@dataclass(frozen=True)
class Range:
    """The range of numbers that a key accepts."""

    words: str  # for messages and the page of keys
    has: Callable[[float], bool]  # whether a number is in the range


FROM_0 = Range("0 or more", lambda value: value >= 0)
FROM_1 = Range("1 or more", lambda value: value >= 1)
POSITIVE = Range("more than 0", lambda value: value > 0)
SHARE = Range("from 0 to 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("more than 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class Declaration:
    """A key's declaration, in addition to its type and its default."""

    meaning: str  # one sentence, for the comment in YAML and the page of keys
    more: str = ""  # more text for the page of keys only
    unit: str = ""
    range: Range | None = None
    choices: tuple[object, ...] = ()
    # The default as users write it, if the value in the code differs. `auto` is None in the code.
    written: object = ...
    follows: str = ""  # another key, whose value is the default
    # The accepted types in words, if there are several. `read` converts them to one type.
    accepts: str = ""
    read: Callable[[str, Any], Any] | None = None
    section: str = ""  # the section of the page of keys that starts with this key
    is_secret: bool = False

    @property
    def is_untyped(self) -> bool:
        """Whether Hydra accepts any value, because the key accepts several types."""
        return self.read is not None or self.written == AUTO

    def value(self, name: str, given: Any) -> Any:
        """Return a key's value in the type of the code.

        Raises:
            ConfigError: the value is not accepted.
        """
        if self.written == AUTO and given in (None, AUTO):
            return None
        if self.read is not None:
            given = self.read(name, given)
        if given is None:
            return None
        if self.choices and given not in self.choices:
            # YAML writes True as true.
            names = [c if isinstance(c, str) else str(c).lower() for c in self.choices]
            raise ConfigError(f"{name}={given}: must be one of {', '.join(names)}")
        if self.range is None:
            return given
        try:
            # The text is converted, because float() would accept a boolean.
            number = float(str(given))
        except ValueError:
            auto = f" or {AUTO}" if self.written == AUTO else ""
            raise ConfigError(f"{name}={given}: must be a number{auto}") from None
        if not self.range.has(number):
            raise ConfigError(f"{name}={number:g}: must be {self.range.words}")
        return number if isinstance(given, str) else given


_SECRET = re.compile(r"[+~]*(robust\.)?notify(\.urls)?=")


def is_secret(word: str) -> bool:
    """Return whether a word of a command line may contain a URL with a password."""
    return _SECRET.match(word) is not None


def key(default: Any, meaning: str, **declared: Any) -> Any:
    """Declare a key with its default, its meaning, and other fields of :class:`Declaration`."""
    about = Declaration(meaning, **declared)
    return field(default=default, repr=not about.is_secret, metadata={"key": about})


def group(cls: type, section: str = "") -> Any:
    """Declare a group of keys. ``section`` is the section of the page of keys that it starts."""
    return field(default_factory=cls, metadata={"group": cls, "section": section})


def open_group(cls: type) -> Any:
    """Declare a group that accepts any keys. ``cls`` has the keys that this package reads."""
    return field(default_factory=cls, metadata={"open": cls})


def integer_or_auto(name: str, given: Any) -> int | None:
    """Return an integer, or None for ``auto``."""
    # A value from an environment variable is text.
    if isinstance(given, str):
        text = given.strip().lower()
        if text == AUTO:
            return None
        given = int(text) if text.isdecimal() else given
    if isinstance(given, bool) or not isinstance(given, int):
        raise ConfigError(f"{name}={given}: must be an integer or auto")
    return given


def device_name(name: str, given: Any) -> str:
    """Return a device such as ``cuda:2``, or several as ``cuda:2,cuda:3``. A number is the index of
    a GPU."""
    devices = given if isinstance(given, (list, tuple)) else str(given).split(",")
    names = [str(device).strip() for device in devices]
    if not names:
        raise ConfigError(f"{name}=[]: names no device; leave it out for any GPU")
    return ",".join(f"cuda:{device}" if device.isdecimal() else device for device in names)


def words(name: str, given: Any) -> tuple[str, ...]:
    """Return the words of a list, or of a string, which is split as a shell splits it."""
    if not isinstance(given, str):
        return words_of_list(name, given)
    try:
        return tuple(shlex.split(given))
    except ValueError as error:
        raise ConfigError(f"{name}={given}: {error}") from None


def words_of_list(name: str, given: Any) -> tuple[str, ...]:
    """Return the words of a list."""
    if given is not None and not isinstance(given, (list, tuple)):
        raise ConfigError(f"{name}={given}: must be a list, {name}=[one, another, …]")
    return tuple(str(word) for word in given or ())


def program_words(name: str, given: Any) -> tuple[str, ...] | None:
    """Return a program and its arguments, or None if the trainer is not a script."""
    return None if given is None else words_of_list(name, given)


def text_or_none(name: str, given: Any) -> str | None:
    """Return a name or number as text. Return None for any other value, because the key may be the
    user's own."""
    return str(given) if isinstance(given, (str, int, float)) else None


def truth_or_path(name: str, given: Any) -> bool | str:
    """Return a boolean or a path. A word without a slash is refused, because it could be a typo of
    ``true`` or ``false`` instead of a directory."""
    if isinstance(given, bool):
        return given
    if isinstance(given, str):
        # A value from an environment variable is text.
        booleans = {"true": True, "false": False}
        if given.lower() in booleans:
            return booleans[given.lower()]
        if "/" in given:
            return given
    raise ConfigError(f"{name}={given}: must be true, false or a path with a slash in it")


def is_not_false(name: str, given: Any) -> bool:
    """Return whether a value is anything but ``false``."""
    return given is not False


def events(name: str, given: Any) -> tuple[str, ...]:
    """Return the chosen events, or all events for null."""
    return EVENTS if given is None else _words_among(EVENTS, name, given)


def cleared_after(name: str, given: Any) -> tuple[str, ...]:
    """Return the occasions after which memory is cleared. Null means no occasion."""
    return _words_among(CLEARED_AFTER, name, given)


def _words_among(accepted: tuple[str, ...], name: str, given: Any) -> tuple[str, ...]:
    """Return a word or the words of a list, and refuse words that are not accepted."""
    chosen = (given,) if isinstance(given, str) else words_of_list(name, given)
    for word in chosen:
        if word not in accepted:
            raise ConfigError(f"{name}={word}: must be one of {', '.join(accepted)}")
    return chosen
