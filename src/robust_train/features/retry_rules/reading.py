"""Reads the user's rules from the value of the key ``retry.rules``. Every process that reads the
config calls `read_rules`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from robust_train.model.errors import ConfigError
from robust_train.model.spec import RetryRule
from robust_train.readable import suggest

_ACTIONS = ("retry", "stop", "exclude_gpu", "smaller_batch")
_CONDITIONS = ("exit_code", "message", "exception")
_TYPES = {"exit_code": int, "message": str, "exception": str, "then": str, "times": int}
_EXAMPLE = "{exit_code: 3, then: retry, times: 5}"


def read_rules(name: str, given: Any) -> tuple[RetryRule, ...]:
    """Return the user's own rules for failures, in order.

    Args:
        name: the name of the key, for messages.
        given: its value.

    Raises:
        ConfigError: the value is not a list of valid rules.
    """
    if not isinstance(given, (list, type(None))):
        raise ConfigError(f"{name}={given}: must be a list like [{_EXAMPLE}]")
    return tuple(_read_rule(f"{name}[{number}]", rule) for number, rule in enumerate(given or ()))


def _read_rule(name: str, given: Any) -> RetryRule:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given}: must be a mapping like {_EXAMPLE}")
    for part in given:
        if part not in _TYPES:
            raise ConfigError(f"{name}.{part}: no such key; {suggest(str(part), _TYPES)}")
    rule = {str(part): value for part, value in given.items() if value is not None}
    if not set(_CONDITIONS).intersection(rule):
        raise ConfigError(f"{name}: needs one of {', '.join(_CONDITIONS)}, for example {_EXAMPLE}")
    then = rule.get("then", "…")
    if then not in _ACTIONS:
        raise ConfigError(f"{name}.then={then}: no such action; {suggest(str(then), _ACTIONS)}")
    for part, value in rule.items():
        is_positive = value > 0 if type(value) is int else bool(value)
        if type(value) is not _TYPES[part] or not is_positive:
            accepted = "an integer, 1 or more" if _TYPES[part] is int else "a string in quotes"
            raise ConfigError(f"{name}.{part}={value}: must be {accepted}")
    if then == "stop" and "times" in rule:
        raise ConfigError(f"{name}.times: cannot be combined with then=stop, which happens once")
    try:
        re.compile(rule.get("message", ""))
    except (re.error, OverflowError, RecursionError) as error:
        pattern = rule["message"]
        raise ConfigError(f"{name}.message={pattern}: not a regular expression: {error}") from None
    return RetryRule(**rule)
