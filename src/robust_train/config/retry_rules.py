"""``retry.rules``: the user's own rules for failures, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.errors import ConfigError
from robust_train.readable import meant
from robust_train.values import RetryRule

_ACTIONS = ("retry", "stop", "exclude_gpu", "smaller_batch")
_CONDITIONS = ("exit_code", "message", "exception")
_TYPES = {"exit_code": int, "message": str, "exception": str, "then": str, "times": int}
_EXAMPLE = "{exit_code: 3, then: retry, times: 5}"


def retry_rules(cfg: DictConfig, *, is_script: bool) -> tuple[RetryRule, ...]:
    """Return the rules in order. Raises ConfigError: one of them cannot be used; one line with its
    key."""
    given: Any = OmegaConf.to_container(cfg.retry.rules, resolve=True)
    rules = enumerate(given)
    return tuple(_rule(f"retry.rules[{number}]", rule, is_script) for number, rule in rules)


def _rule(key: str, given: Any, is_script: bool) -> RetryRule:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={given}: accepted is a mapping like {_EXAMPLE}")
    for name in given:
        if name not in _TYPES:
            raise ConfigError(f"{key}.{name}: no such key; {meant(str(name), _TYPES)}")
    rule = {name: value for name, value in given.items() if value is not None}
    if not set(_CONDITIONS).intersection(rule):
        raise ConfigError(f"{key}: needs one of {', '.join(_CONDITIONS)}, as in {_EXAMPLE}")
    then = rule.get("then", "…")
    if then not in _ACTIONS:
        raise ConfigError(f"{key}.then={then}: no such action; {meant(str(then), _ACTIONS)}")
    for name, value in rule.items():
        is_positive = value > 0 if type(value) is int else bool(value)
        if type(value) is not _TYPES[name] or not is_positive:
            accepted = "an integer of 1 or more" if _TYPES[name] is int else "a string in quotes"
            raise ConfigError(f"{key}.{name}={value}: accepted is {accepted}")
    if then == "stop" and "times" in rule:
        raise ConfigError(f"{key}.times: does not go with then=stop, which happens once")
    if is_script and "exception" in rule:
        raise ConfigError(f"{key}.exception: a script has none; use message or exit_code")
    if not is_script and "exit_code" in rule:
        raise ConfigError(f"{key}.exit_code: a function has none; use exception")
    try:
        re.compile(rule.get("message", ""))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{key}.message={rule['message']}: no such pattern: {error}") from None
    return RetryRule(**rule)
