"""Explains a user's mistake in one line: the key, its value, what is wrong and what is accepted.

Commands call :func:`explain` for an error before or in Hydra, a sweep calls :func:`explain_job`.
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
from robust_train.readable import meant

REFUSALS = (
    ConfigError,
    HydraException,
    OmegaConfBaseException,
    OSError,
    yaml.YAMLError,  # the mistake is in a file that Hydra reads
)

_SEVERAL_VALUES = "{0}={1}: several values; add -m to sweep over them, or write a list: {0}=[{1}]"
_NOT_INSTALLED = '{0}={1}: not installed; pip install "robust-train['
_ANSWERS = {
    r"Ambiguous value for argument '([^=]*)=(.+)'": _SEVERAL_VALUES,
    r"Sweep parameters '([^=]*)=(.+)' requires --multirun": _SEVERAL_VALUES,
    r"In '?([^':\n]+)'?: Could not override '[^']+/hydra/(launcher|sweeper)@?[^']*'": (
        "{0}: cannot choose hydra/{1} with a relative path; write 'override /hydra/{1}: …' under "
        "'# @package _global_', or put hydra/{1}=… on the command line"
    ),
    r"In '([^']+)': [^\n]*override '/?(model|dataset|trainer)\b": (
        "{0}: 'override /{1}: …' finds no group {1} before it, and robust brings none: leave the "
        "line out, or write '{1}: …' for a group of your own"
    ),
    r"In (\S+): Override '(hydra/\w+) : (\w+)' is defined before": (
        "{0}: 'override {1}: {2}' comes too early; overrides belong at the end of the defaults list"
    ),
    r"Could not \w+ '(hydra/\w+)/(joblib)'": (
        "{0}={1}: not installed; pip install hydra-joblib-launcher"
    ),
    # Names the extra of this package that installs a missing plugin.
    r"Could not \w+ '(hydra/\w+)/(submitit_\w+)'": _NOT_INSTALLED + 'slurm]"',
    r"Could not \w+ '(hydra/\w+)/(ray|ray_aws)'": _NOT_INSTALLED + 'ray]"',
}
"""Explanations of Hydra's messages, in order. Braces are filled with the groups of the pattern's
match."""

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
    return getattr(_of_the_system(error), "exit_code", EXIT_BAD_CONFIG)


def _of_the_system(error: BaseException) -> BaseException:
    """Turn an error of the system into the error of this package for it, such as a run folder that
    Hydra cannot write."""
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
    """Return one line for the user about one of :data:`REFUSALS`. ``config_name`` is this command's
    primary config, and ``arguments`` is its command line."""
    if isinstance(error := _of_the_system(error), ConfigError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not an override; write key=value without spaces around =, and "
            "quotes around a value that holds spaces, commas, brackets or =: 'key=\"a, b\"'"
        )
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
        start = error.context_mark
        begun = f" (it begins in line {start.line + 1})" if start is not None else ""
        context = f" {error.context}{begun}" if error.context else ""
        return f"{place}: not YAML: {error.problem}{context}"
    chain = "\n".join(str(link) for link in _chain(error))
    for pattern, answer in _ANSWERS.items():
        match = re.search(pattern, chain)
        if match:
            return answer.format(*match.groups())
    match = _UNKNOWN_OPTION.search(chain)
    if match:
        return _unknown_option(match[1], match[2], chain)
    lines = [line for line in chain.splitlines() if "HYDRA_FULL_ERROR" not in line]
    if isinstance(error, MissingConfigException):
        return lines[0].strip()
    named_key = _FULL_KEY.search(chain)
    key = named_key[1] if named_key else "?"
    match = _WRONG_TYPE.search(chain)
    if match:
        accepted = _ACCEPTED.get(match[2], f"a value of type {match[2]}")
        return f"{key}={match[1]}: must be {accepted}"
    if _NO_LIST.search(chain):
        return f"{key}: must be a list, '{key}=[one, \"two words\"]'"
    match = _UNKNOWN_KEY.search(chain)
    if match:
        overrides = [word for word in arguments if not word.startswith("-")]
        key = match[1]
        if not key and named_key:
            key = named_key[1]
        if not key:
            key = match[2]
        return _unknown_key(key, overrides, config_path, config_name)
    return " ".join(line.strip() for line in lines[:3] if line.strip())


def explain_job(error: BaseException, config: DictConfig, overrides: Sequence[str]) -> str:
    """Return such a line about a job of a sweep. Its ``config`` shows the origin of its keys."""
    path: str | None = None
    for source in config.hydra.runtime.config_sources:
        if source.provider == "main":
            is_folder = source.schema == "file"
            path = source.path if is_folder else f"pkg://{source.path}"
    return explain(error, config.hydra.job.config_name, overrides, path)


def _unknown_option(group: str, option: str, chain: str) -> str:
    listed = _OPTIONS.search(chain)
    options = [name for name in (listed[1].split() if listed else ()) if name != "__init__"]
    close = difflib.get_close_matches(option, options, n=1)
    near = f"; did you mean {close[0]}?" if close else ""
    hint = f"; the options are {', '.join(options)}" if options else ""
    return f"{group}={option}: no such option{hint}{near}"


def _unknown_key(
    key: str, overrides: Sequence[str], config_path: str | None, config_name: str | None
) -> str:
    typed = next((o for o in overrides if o.partition("=")[0].lstrip("+~") == key), key)
    others = [o for o in overrides if o != typed and "," not in o]
    parent, _, name = key.rpartition(".")
    everything = all_keys(others, config_path, config_name)
    group = key.partition(".")[0]
    value = typed.partition("=")[2]
    if any(o.startswith(f"{group}=") and "," in o for o in overrides):
        return f"{typed}: no such key; in a sweep over {group} write {key}=choice({value})"
    beside = [k for k in everything if k.rpartition(".")[0] == parent]
    elsewhere = [k for k in everything if k.rpartition(".")[2] == name]
    if elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    elif parent and beside:
        hint = meant(name, [k.rpartition(".")[2] for k in beside], f"{parent}.")
    else:
        near = _nearest(name, everything, 0.75)
        if not near:
            near = _nearest(key, everything, 0.75)
        command = "robust-train train " if config_path == OURS else ""
        hint = f"did you mean {near}?" if near else f"{command}--cfg job lists all"
    if typed in overrides and not typed.startswith("~"):
        plus = f"a key of your own takes a plus: +{typed}"
        hint += f" A{plus[1:]}" if hint.endswith("?") else f"; {plus}"
    return f"{typed}: no such key; {hint}"


def _nearest(name: str, keys: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the key that is most similar to ``name``, which may lack its group."""
    full = {key.rpartition(".")[2]: key for key in reversed(keys)} | {key: key for key in keys}
    close = difflib.get_close_matches(name, full, n=1, cutoff=cutoff)
    return full[close[0]] if close else None


def composed(
    overrides: Sequence[str], config_path: str | None = OURS, config_name: str | None = "robust"
) -> DictConfig:
    """Return a config with overrides, by default the config of ``train_robust.py``. ``config_path``
    is its folder, None for Hydra's ConfigStore."""
    running = GlobalHydra.instance().hydra  # the sweep that is being checked
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
    """Return one line about an option that Hydra does not have, or an override that it would not
    find, or None if all are valid."""
    lost = unknown_to_hydra(arguments)
    unknown = [argument for argument in lost if argument.startswith("-")]
    if lost and not unknown:
        return f"{lost[0]}: write -m and other options before the first override"
    if not unknown:
        return None
    name, _, value = unknown[0].lstrip("-").partition("=")
    after = arguments[arguments.index(unknown[0]) + 1 :][:1] if unknown[0] in arguments else ()
    if not value:
        value = next((argument for argument in after if not re.search("^-[a-z-]|=", argument)), "…")
    keys = all_keys((), config_path, config_name)
    key = _nearest(name.replace("-", "_"), keys)
    write = f"{key}={value}" if key else "KEY=VALUE"
    return f"{unknown[0]}: no such option; overrides have no dashes: write {write}"


def all_keys(
    overrides: Sequence[str], config_path: str | None = OURS, config_name: str | None = "robust"
) -> list[str]:
    """Return the keys of the root and of all groups, ``training.lr`` before ``model.lr``, empty if
    the config cannot be composed."""
    try:
        cfg = composed(overrides, config_path, config_name)
    except Exception:
        return []
    root = [str(key) for key in cfg]
    groups = [k for k in root if not OmegaConf.is_missing(cfg, k) and OmegaConf.is_dict(cfg[k])]
    groups.sort(key=lambda group: group not in ("training", "memory"))
    return root + [f"{group}.{name}" for group in groups for name in cfg[group]]


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in links:
        links.append(current)
        current = current.__cause__ or current.__context__
    return links
