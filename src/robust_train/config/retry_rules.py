"""``retry.rules``: the user's own rules for failures, checked before anything starts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from robust_train.errors import ConfigError
from robust_train.values import RetryRule

_ACTIONS = ("retry", "stop", "exclude_gpu", "smaller_batch")
_CONDITIONS = ("exit_code", "message", "exception")
_KEYS = [item.name for item in fields(RetryRule)]
_EXAMPLE = "{exit_code: 3, then: retry, times: 5}"


def retry_rules(cfg: DictConfig, *, is_script: bool) -> tuple[RetryRule, ...]:
    """Return the rules in order.

    Raises:
        ConfigError: one of them cannot be used; one line with its key.
    """
    given: Any = OmegaConf.to_container(cfg.retry.rules, resolve=True)
    rules = enumerate(given)
    return tuple(_rule(f"retry.rules[{number}]", rule, is_script) for number, rule in rules)


def _rule(key: str, given: Any, is_script: bool) -> RetryRule:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={given}: accepted is a mapping like {_EXAMPLE}")
    for name in given:
        if name not in _KEYS:
            raise ConfigError(f"{key}.{name}: no such key{_meant(name, _KEYS)}")
    rule = {name: value for name, value in given.items() if value is not None}
    if not set(_CONDITIONS).intersection(rule):
        raise ConfigError(f"{key}: needs one of {', '.join(_CONDITIONS)}, as in {_EXAMPLE}")
    then = rule.get("then", "…")
    if then not in _ACTIONS:
        raise ConfigError(f"{key}.then={then}: no such action{_meant(then, _ACTIONS)}")
    for name, most in (("exit_code", 255), ("times", None)):
        value = rule.get(name, 1)
        if type(value) is not int or value < 1 or (most is not None and value > most):
            accepted = "an integer of 1 or more" if most is None else f"an integer from 1 to {most}"
            raise ConfigError(f"{key}.{name}={value}: accepted is {accepted}")
    if then == "stop" and "times" in rule:
        raise ConfigError(f"{key}.times: does not go with then=stop, which happens once")
    for name in ("message", "exception"):
        if not isinstance(rule.get(name, "-"), str):
            raise ConfigError(f"{key}.{name}={rule[name]}: accepted is a string in quotes")
    wrong = "exception" if is_script else "exit_code"
    if wrong in rule:
        whose, use = ("a script", "message") if is_script else ("a function", "exception")
        raise ConfigError(f"{key}.{wrong}: {whose} has none; use {use}")
    try:
        re.compile(rule.get("message", ""))
    except re.error as error:
        raise ConfigError(f"{key}.message={rule['message']}: no such pattern: {error}") from None
    return RetryRule(**rule)


def _meant(name: object, names: Any) -> str:
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; accepted are {', '.join(names)}"
