"""Explains a mistake in a command line or config in one line: the key, its value, the problem and
the accepted values.

Hydra's and OmegaConf's own messages are long, and name classes. Commands call :func:`explain` for
an error before or in Hydra, and a sweep calls :func:`explain_job`, both in the launcher's process.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.compat import unknown_to_hydra, version_base_options
from robust_train.config.search_path import OURS
from robust_train.model.errors import (
    EXIT_BAD_CONFIG,
    ConfigError,
    find_limit_error,
    make_folder_error,
)
from robust_train.readable import suggest

REFUSALS = (
    ConfigError,
    HydraException,
    OmegaConfBaseException,
    OSError,
    yaml.YAMLError,  # raised for a mistake in a file that Hydra reads
)

_SEVERAL_VALUES = "{0}={1}: several values; add -m to sweep over them, or write a list: {0}=[{1}]"
_NOT_INSTALLED = '{0}={1}: not installed; pip install "robust-train['
# Patterns of Hydra's messages with our explanation, in order. Braces are filled with the groups of
# the match.
_ANSWERS = {
    r"Ambiguous value for argument '([^=]*)=(.+)'": _SEVERAL_VALUES,
    r"Sweep parameters '([^=]*)=(.+)' requires --multirun": _SEVERAL_VALUES,
    r"In '?([^':\n]+)'?: Could not override '[^']+/hydra/(launcher|sweeper)@?[^']*'": (
        "{0}: cannot choose hydra/{1} with a relative path; write 'override /hydra/{1}: …' under "
        "'# @package _global_', or put hydra/{1}=… on the command line"
    ),
    r"In '([^']+)': [^\n]*override '/?(model|dataset|trainer)\b": (
        "{0}: 'override /{1}: …' finds no group {1} before it, and robust has none: leave the line "
        "out, or write '{1}: …' for a group of your own"
    ),
    r"In (\S+): Override '(hydra/\w+) : (\w+)' is defined before": (
        "{0}: 'override {1}: {2}' comes too early; overrides belong at the end of the defaults list"
    ),
    r"Could not \w+ '(hydra/\w+)/(joblib)'": (
        "{0}={1}: not installed; pip install hydra-joblib-launcher"
    ),
    r"Could not \w+ '(hydra/\w+)/(submitit_\w+)'": _NOT_INSTALLED + 'slurm]"',
    r"Could not \w+ '(hydra/\w+)/(ray|ray_aws)'": _NOT_INSTALLED + 'ray]"',
}

# Patterns of Hydra's and OmegaConf's messages that need more than their groups for an explanation.
_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in")
_FULL_KEY = re.compile(r"full_key: (\S+)")
_WRONG_TYPE = re.compile(
    r"Value '(.*?)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)", re.DOTALL
)
_NO_LIST = re.compile(r"Invalid value assigned: \w+ is not a ListConfig|merge \w+ with ListConfig")
_UNKNOWN_OPTION = re.compile(r"Could not find '([^']+)/([^'/]+)'")
_OPTIONS = re.compile(r"Available options in '[^']+':\n((?:\t.*\n?)+)")
_ACCEPTED = {"Integer": "an integer", "Float": "a number", "bool": "true or false"}


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error of `REFUSALS`."""
    return getattr(_convert_system_error(error), "exit_code", EXIT_BAD_CONFIG)


def _convert_system_error(error: BaseException) -> BaseException:
    """Return this package's error for an error of the system, for example if Hydra cannot write the
    run folder. Return other errors unchanged."""
    limit = find_limit_error(error)
    if limit is not None:
        return limit
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        place = error.filename or "the run folder"
        problem = f"{place}: {error.strerror}; choose another folder with hydra.run.dir=…"
        return make_folder_error(problem, error)
    return error


def explain(
    error: BaseException,
    config_name: str | None,
    arguments: Sequence[str],
    config_path: str | None = OURS,
) -> str:
    """Return one line for the user about an error of :data:`REFUSALS`.

    Args:
        error: the error.
        config_name: the command's primary config.
        arguments: the command line.
        config_path: the folder of the configs.
    """
    error = _convert_system_error(error)
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not an override; write key=value without spaces around =, and "
            "quotes around a value that contains spaces, commas, brackets or =: 'key=\"a, b\"'"
        )
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return _explain_yaml_error(error)
    messages = "\n".join(str(link) for link in _follow_causes(error))
    for pattern, answer in _ANSWERS.items():
        match = re.search(pattern, messages)
        if match:
            return answer.format(*match.groups())
    match = _UNKNOWN_OPTION.search(messages)
    if match:
        return _explain_unknown_option(match[1], match[2], messages)
    lines = [line for line in messages.splitlines() if "HYDRA_FULL_ERROR" not in line]
    if isinstance(error, MissingConfigException):
        return lines[0].strip()
    full_key = _FULL_KEY.search(messages)
    key = full_key[1] if full_key else "?"
    match = _WRONG_TYPE.search(messages)
    if match:
        accepted = _ACCEPTED.get(match[2], f"a value of type {match[2]}")
        return f"{key}={match[1]}: must be {accepted}"
    if _NO_LIST.search(messages):
        return f"{key}: must be a list, '{key}=[one, \"two words\"]'"
    match = _UNKNOWN_KEY.search(messages)
    if match:
        overrides = [word for word in arguments if not word.startswith("-")]
        override_key = match[1]
        if override_key:
            key = override_key
        elif full_key is None:
            key = match[2]
        return _explain_unknown_key(key, overrides, config_path, config_name)
    return " ".join(line.strip() for line in lines[:3] if line.strip())


def _explain_yaml_error(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    line = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}"
    if error.context:
        line += f" {error.context}"
        if error.context_mark is not None:
            line += f" (it begins in line {error.context_mark.line + 1})"
    return line


def explain_job(error: BaseException, config: DictConfig, overrides: Sequence[str]) -> str:
    """Return one line for the user about an error of a sweep's job. Its composed ``config`` names
    the folder that its keys come from."""
    path: str | None = None
    for source in config.hydra.runtime.config_sources:
        if source.provider == "main":
            is_folder = source.schema == "file"
            path = source.path if is_folder else f"pkg://{source.path}"
    return explain(error, config.hydra.job.config_name, overrides, path)


def _explain_unknown_option(group: str, option: str, messages: str) -> str:
    listed = _OPTIONS.search(messages)
    names = listed[1].split() if listed else []
    options = [name for name in names if name != "__init__"]
    line = f"{group}={option}: no such option"
    if options:
        line += f"; the options are {', '.join(options)}"
    close = difflib.get_close_matches(option, options, n=1)
    if close:
        line += f"; did you mean {close[0]}?"
    return line


def _explain_unknown_key(
    key: str, overrides: Sequence[str], config_path: str | None, config_name: str | None
) -> str:
    override = key
    for word in overrides:
        if word.partition("=")[0].lstrip("+~") == key:
            override = word
            break
    group = key.partition(".")[0]
    if any(word.startswith(f"{group}=") and "," in word for word in overrides):
        value = override.partition("=")[2]
        return f"{override}: no such key; in a sweep over {group} write {key}=choice({value})"
    others = [word for word in overrides if word != override and "," not in word]
    hint = _suggest_key(key, all_keys(others, config_path, config_name))
    if hint is None:
        command = "robust-train train " if config_path == OURS else ""
        hint = f"{command}--cfg job lists all"
    if override in overrides and not override.startswith("~"):
        if hint.endswith("?"):
            hint += f" A key of your own takes a plus: +{override}"
        else:
            hint += f"; a key of your own takes a plus: +{override}"
    return f"{override}: no such key; {hint}"


def _suggest_key(key: str, accepted: Sequence[str]) -> str | None:
    """Return ``did you mean KEY?`` or the keys of the group, or None if no key is similar."""
    parent, _, name = key.rpartition(".")
    same_name = [other for other in accepted if other.rpartition(".")[2] == name]
    if same_name:
        return f"did you mean {same_name[0]}?"
    same_group = [other for other in accepted if other.rpartition(".")[0] == parent]
    if parent and same_group:
        names = [other.rpartition(".")[2] for other in same_group]
        return suggest(name, names, f"{parent}.")
    near = _find_nearest(name, accepted, 0.75)
    if near is None:
        near = _find_nearest(key, accepted, 0.75)
    return None if near is None else f"did you mean {near}?"


def _find_nearest(name: str, keys: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the key that is most similar to ``name``, which may lack its group, or None."""
    full = {key.rpartition(".")[2]: key for key in reversed(keys)} | {key: key for key in keys}
    close = difflib.get_close_matches(name, full, n=1, cutoff=cutoff)
    return full[close[0]] if close else None


def composed(
    overrides: Sequence[str], config_path: str | None = OURS, config_name: str | None = "robust"
) -> DictConfig:
    """Return a config with overrides, by default the config of ``train_robust.py``. ``config_path``
    is its folder, or None for Hydra's ConfigStore."""
    # A sweep may be running, so its Hydra is restored below.
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    folder = config_path or "pkg://hydra.conf"
    module = folder.removeprefix("pkg://")
    is_module = module != folder
    start = initialize_config_module if is_module else initialize_config_dir
    try:
        with start(module, **version_base_options("1.3")):
            return compose(config_name, overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = running


def explain_option(
    arguments: Sequence[str], config_name: str | None, config_path: str | None = OURS
) -> str | None:
    """Return one line about an option that Hydra does not have, or an override that Hydra would
    ignore, or None if the command line is valid."""
    ignored = unknown_to_hydra(arguments)
    if not ignored:
        return None
    unknown_options = [argument for argument in ignored if argument.startswith("-")]
    if not unknown_options:
        return f"{ignored[0]}: write -m and other options before the first override"
    option = unknown_options[0]
    name, _, value = option.lstrip("-").partition("=")
    if not value:
        value = _value_after(option, arguments)
    keys = all_keys((), config_path, config_name)
    key = _find_nearest(name.replace("-", "_"), keys)
    override = f"{key}={value}" if key else "KEY=VALUE"
    return f"{option}: no such option; overrides have no dashes: write {override}"


def _value_after(option: str, arguments: Sequence[str]) -> str:
    """Return the word after an option if it can be the option's value, or else ``…``."""
    if option in arguments:
        following = arguments[arguments.index(option) + 1 :]
        if following and not re.search("^-[a-z-]|=", following[0]):
            return following[0]
    return "…"


def all_keys(
    overrides: Sequence[str], config_path: str | None = OURS, config_name: str | None = "robust"
) -> list[str]:
    """Return the keys of the root and of all groups, and an empty list if the config cannot be
    composed. ``training.lr`` comes before ``model.lr``, so that it is suggested for ``lr``."""
    try:
        cfg = composed(overrides, config_path, config_name)
    except Exception:
        return []
    keys = [str(key) for key in cfg]
    groups = [k for k in keys if not OmegaConf.is_missing(cfg, k) and OmegaConf.is_dict(cfg[k])]
    groups.sort(key=lambda group: group not in ("training", "memory"))
    return keys + [f"{group}.{name}" for group in groups for name in cfg[group]]


def _follow_causes(error: BaseException) -> list[BaseException]:
    """Return an error and the errors that caused it."""
    links: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in links:
        links.append(current)
        current = current.__cause__ or current.__context__
    return links
