"""Keeps the values of a config's resolvers the same in all attempts and launches of a job.

A resolver such as Hydra's ``now``, or a user resolver that draws a random name, returns another
value in each copy of a config, and each attempt has its own copy. So the launcher evaluates each
resolver only once per job and set of arguments. ``resolved.json`` keeps the values for later
launches, because such a value may be part of the path of the job's checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from omegaconf import Container, OmegaConf

from robust_train.compat import intercept_resolvers
from robust_train.files import read_object, write_json
from robust_train.folder.identity import read_identity
from robust_train.folder.secrets import public_command
from robust_train.model.errors import ConfigError
from robust_train.readable import shorten

FILE = "resolved.json"
_PLAIN = (str, int, float, bool, NoneType)
_LONGEST_VALUE = 1000
_LONGEST_COLLECTION = 100_000  # such as the indices of a split
_LONGEST_SHOWN = 100
_TIME = "now"

log = logging.getLogger("robust_train")

Call = tuple[str, str, tuple[str, ...]]
"""The key whose value has an interpolation, the name of its resolver, and the arguments."""


class Resolvers:
    """Evaluates each resolver of a job's config once.

    Args:
        values: the values of an earlier launch.
    """

    def __init__(self, values: Mapping[Call, Any] | None = None) -> None:
        self._known: dict[Call, Any] = dict(values or {})
        # Calls of an earlier launch that this launch has not made yet.
        self._earlier = set(self._known)
        # Values that would differ if the resolvers were evaluated again in this launch.
        self._others_now: dict[Call, Any] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Make resolvers return their first values again within the ``with`` block."""
        with intercept_resolvers(self._evaluate):
            yield

    def _evaluate(
        self, key: str, name: str, arguments: tuple[str, ...], resolve: Callable[[], Any]
    ) -> Any:
        call = key, name, arguments
        if call not in self._known:
            self._known[call] = resolve()
        elif call in self._earlier:
            self._earlier.remove(call)
            self._compare(call, resolve)
        value = self._known[call]
        if isinstance(value, Container):
            # A node of OmegaConf has one parent, so each copy of the config needs its own node.
            return copy.deepcopy(value)
        return value

    def _compare(self, call: Call, resolve: Callable[[], Any]) -> None:
        """Note the value that a resolver would return now, if it differs from the earlier value."""
        # The earlier value is used, so a resolver that fails now does no harm.
        with contextlib.suppress(Exception):
            value = _without_nodes(resolve())
            if value != _without_nodes(self._known[call]):
                self._others_now[call] = value

    def warn_of_earlier_values(self) -> None:
        """Warn about values of an earlier launch that would differ now.

        The user may have changed a variable, or a file that a resolver reads, and expect the change
        to take effect. There is no warning about the time, which always differs.
        """
        others = {
            call[0]: _difference(call, self._known[call], value)
            for call, value in self._others_now.items()
            if call[1] != _TIME
        }
        if others:
            log.warning(
                "resolvers keep the values of this job's first launch: %s; to change one, give "
                "it: '%s=…'",
                ", ".join(others.values()),
                next(iter(others)),
            )

    def save(self, run_dir: Path, job: str) -> None:
        """Write the values for later launches, without secrets. A full disk is ignored."""
        values = [
            {
                "key": key,
                "resolver": name,
                "arguments": list(arguments),
                "value": _without_nodes(value),
            }
            for (key, name, arguments), value in self._known.items()
            if _may_be_written(f"{key}:{name}:{','.join(arguments)}", value)
        ]
        if values:
            with contextlib.suppress(OSError):
                write_json(run_dir / FILE, {"job": job, "values": values})


def _difference(call: Call, before: Any, now: Any) -> str:
    """Return a key with both values, or only the key if a value may be a secret."""
    key, name, arguments = call
    if not _may_be_written(f"{key}:{name}:{','.join(arguments)}", now):
        return key
    shown = [shorten(str(_without_nodes(value)), _LONGEST_SHOWN) for value in (before, now)]
    return f"{key}={shown[0]} (now {shown[1]})"


def _may_be_written(about: str, value: Any) -> bool:
    """Return whether a value survives a JSON file unchanged, and holds no secret.

    Args:
        about: the key, the resolver and its arguments, which may mark the value as a secret.
        value: the value.
    """
    value = _without_nodes(value)
    if isinstance(value, (list, tuple, dict)):
        if len(str(value)) > _LONGEST_COLLECTION:
            return False
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        # JSON would convert other keys to strings.
        has_string_keys = all(isinstance(key, str) for key in items)
        if isinstance(value, dict) and not has_string_keys:
            return False
        return all(_may_be_written(f"{key}:{about}", item) for key, item in items.items())
    if not isinstance(value, _PLAIN) or len(str(value)) > _LONGEST_VALUE:
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False  # JSON has no NaN or infinity
    word = f"{about}={value}"
    return public_command([word]) == [word]


def _without_nodes(value: Any) -> Any:
    """Return a list or dictionary of OmegaConf as a plain list or dictionary."""
    if isinstance(value, Container):
        return OmegaConf.to_container(value, resolve=True)
    return value


def resolvers_of(run_dir: Path | None) -> Resolvers:
    """Return the resolvers for a launch, with the values of the folder's unfinished job, if any."""
    # A damaged folder is reported later, when the job starts in it.
    with contextlib.suppress(OSError, ConfigError):
        job = None if run_dir is None else read_identity(run_dir)
        if run_dir is not None and job is not None and job.completed is None:
            return Resolvers(_values_in(run_dir, job.id))
    return Resolvers()


def _values_in(run_dir: Path, job: str) -> dict[Call, Any]:
    content = read_object(run_dir / FILE)
    values: dict[Call, Any] = {}
    with contextlib.suppress(KeyError, TypeError):
        if content["job"] == job:
            for entry in content["values"]:
                call = entry["key"], entry["resolver"], tuple(entry["arguments"])
                values[call] = entry["value"]
    return values
