"""A user's mistake in one line: the key, the value, what was wrong and what is accepted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robust_train.errors import ConfigError

REFUSALS = (ConfigError, HydraException, OmegaConfBaseException, OSError)

_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in")
_FULL_KEY = re.compile(r"full_key: (\S+)")
_WRONG_TYPE = re.compile(
    r"Value '(.*?)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)", re.DOTALL
)
_NO_LIST = re.compile(r"Invalid value assigned: \w+ is not a ListConfig")
_UNKNOWN_OPTION = re.compile(r"Could not find '([^']+)/([^'/]+)'")
_OPTIONS = re.compile(r"Available options in '[^']+':\n((?:\t.*\n?)+)")

_NO_SWEEP = re.compile(
    r"Ambiguous value for argument '(.+)'|Sweep parameters '(.+)' requires --multirun"
)
_RELATIVE_LAUNCHER = re.compile(
    r"In '?([^':\n]+)'?: Could not override '[^']+/hydra/(launcher|sweeper)@?[^']*'"
)
_EARLY_LAUNCHER = re.compile(r"In (\S+): Override '(hydra/\w+) : (\w+)' is defined before")

_MISSING_PLUGIN = re.compile(r"Could not (?:find|load) '(hydra/\w+)/(\w+)'")
_EXTRAS = {
    "hydra/launcher/joblib": "sweep",
    "hydra/launcher/submitit_local": "slurm",
    "hydra/launcher/submitit_slurm": "slurm",
    "hydra/launcher/ray": "ray",
    "hydra/launcher/ray_aws": "ray",
    "hydra/sweeper/optuna": "sweep",
}
"""Which of our extras brings an option that is not there."""

_ACCEPTED = {
    "Integer": "an integer",
    "Float": "a number",
    "bool": "true or false",
}


def explain(error: BaseException, config_name: str, arguments: Sequence[str]) -> str:
    """Return one line for the user about one of :data:`REFUSALS`.

    ``config_name`` is this command's primary config; ``arguments`` is its command line.
    """
    chain = "\n".join(str(link) for link in _chain(error))
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        place = error.filename or "the run folder"
        return f"{place}: {error.strerror}; choose another folder with hydra.run.dir=…"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: cannot be read as an override; accepted is key=value, with quotes "
            "around values that hold spaces, commas or brackets: 'key=\"a, b\"'"
        )
    if sentence := _about_sweeps(chain) or _not_installed(chain):
        return sentence
    if match := _UNKNOWN_OPTION.search(chain):
        return _unknown_option(match[1], match[2], chain)
    if isinstance(error, MissingConfigException):
        return _joined(chain.splitlines()[:1])
    found = _FULL_KEY.search(chain)
    key = found[1] if found else None
    if match := _WRONG_TYPE.search(chain):
        accepted = _ACCEPTED.get(match[2], f"a value of type {match[2]}")
        return f"{key or '?'}={match[1]}: accepted is {accepted}"
    if _NO_LIST.search(chain):
        return f"{key or '?'}: accepted is a list, '{key or '?'}=[one, \"two words\"]'"
    if match := _UNKNOWN_KEY.search(chain):
        return _unknown_key(match[1] or key or match[2], config_name, overrides)
    return _joined(line for line in chain.splitlines()[:3] if "HYDRA_FULL_ERROR" not in line)


def _about_sweeps(chain: str) -> str | None:
    """Return the mistake in a sweep or in the choice of its launcher, None if there is none."""
    if match := _NO_SWEEP.search(chain):
        key, _, value = (match[1] or match[2]).partition("=")
        return (
            f"{key}={value}: several values; add -m for a sweep over them, or write a list as "
            f"{key}=[{value}]"
        )
    if match := _RELATIVE_LAUNCHER.search(chain):
        group = f"hydra/{match[2]}"
        return (
            f"{match[1]}: cannot choose {group} with a relative path; write 'override /{group}: …' "
            f"under '# @package _global_', or put {group}=… on the command line"
        )
    if match := _EARLY_LAUNCHER.search(chain):
        return (
            f"{match[1]}: 'override {match[2]}: {match[3]}' comes too early; overrides belong at "
            "the end of the defaults list"
        )
    return None


def _not_installed(chain: str) -> str | None:
    """Return which extra installs the launcher or sweeper."""
    match = _MISSING_PLUGIN.search(chain)
    extra = match and _EXTRAS.get(f"{match[1]}/{match[2]}")
    if match is None or extra is None:
        return None
    return f'{match[1]}={match[2]}: is not installed; pip install "robust-train[{extra}]" brings it'


def _unknown_option(group: str, option: str, chain: str) -> str:
    listed = _OPTIONS.search(chain)
    options = listed[1].split() if listed else []
    hint = f"; accepted are {', '.join(o for o in options if o != '__init__')}" if options else ""
    return f"{group}={option}: no such option{hint}{_did_you_mean(option, options)}"


def _unknown_key(key: str, config_name: str, overrides: Sequence[str]) -> str:
    typed = next((o for o in overrides if o.partition("=")[0].lstrip("+~") == key), key)
    others = [o for o in overrides if o != typed]
    parent, _, name = key.rpartition(".")
    accepted = [str(k) for k in _keys_under(parent, config_name, others)]
    place = f" under {parent}" if parent else ""
    hint = f"; accepted{place} are {', '.join(accepted)}" if accepted else ""
    group = key.partition(".")[0]
    if any(o.startswith(f"{group}=") and "," in o for o in overrides):
        value = typed.partition("=")[2]
        hint = f"; in a sweep over {group} write {key}=choice({value})"
    everything = _all_keys(config_name, others)
    elsewhere = [one for one in everything if one.rpartition(".")[2] == name]
    if accepted and not (elsewhere and not parent):
        meant = _did_you_mean(name, accepted)
    else:
        meant = (
            f" (did you mean {elsewhere[0]}?)"
            if elsewhere
            else _did_you_mean(key, everything, 0.75)
        )
    return f"{typed}: no such key{meant}{hint}"


def _did_you_mean(name: str, names: Sequence[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


def _keys_under(parent: str, config_name: str, overrides: Sequence[str]) -> list[Any]:
    """Return the keys beside the wrong one."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("robust_train.configs", version_base="1.3"):
            cfg = compose(config_name, overrides=[o for o in overrides if "," not in o])
        node = OmegaConf.select(cfg, parent) if parent else cfg
    except Exception:
        return []
    return list(node) if isinstance(node, DictConfig) else []


def _all_keys(config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return the keys of all groups, ``training.lr`` before ``model.lr``."""
    groups = ("training", "memory", "dataset", "model", "trainer")
    return [f"{g}.{name}" for g in groups for name in _keys_under(g, config_name, overrides)]


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in links:
        links.append(current)
        current = current.__cause__ or current.__context__
    return links


def _joined(lines: Any) -> str:
    return " ".join(line.strip() for line in lines if line.strip())
