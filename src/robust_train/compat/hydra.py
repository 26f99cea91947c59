"""Private names of Hydra and OmegaConf, and differences between their versions."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


@contextlib.contextmanager
def skip_mode_lookup() -> Iterator[None]:
    """Let Hydra ignore the key ``hydra.mode`` within the block, so that only ``-m`` starts a sweep.

    Hydra then composes the config once instead of twice. If a version of Hydra reads the key in
    another way, this has no effect.
    """
    from hydra._internal.hydra import Hydra

    original = getattr(Hydra, "get_mode", None)
    if original is not None:
        Hydra.get_mode = lambda *args, **keys: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        if original is not None:
            Hydra.get_mode = original  # type: ignore[method-assign]


def unknown_to_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are neither options of Hydra nor overrides."""
    from hydra._internal.utils import get_args_parser

    return list(get_args_parser().parse_known_args(list(arguments))[1])


def add_overrides(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Add overrides to a command line. They are placed next to its other overrides, because Hydra
    accepts overrides in one place only."""
    from hydra._internal.utils import get_args_parser

    existing = get_args_parser().parse_known_args(list(arguments))[0].overrides
    place = 0
    if existing:
        # Search from the end, because the value of an earlier option may be the same word.
        place = len(arguments) - arguments[::-1].index(existing[-1])
    return [*arguments[:place], *overrides, *arguments[place:]]


def unwrap_job_return(job: Any) -> Any:
    """Return or raise the outcome of a Hydra job. Its property raises the exception."""
    return job._return_value


HYDRAS_OWN: Any = object()
"""Stands for an argument that is not passed to Hydra, so that Hydra uses its default."""


def default_config_path(version_base: str | None) -> str | None:
    """Return the default config path of ``hydra.main``."""
    import hydra

    if version_base is None:
        return None
    if version_base is HYDRAS_OWN:
        # Without the argument, Hydra 1.3 behaves like 1.1.
        is_like_1_1 = hydra.__version__.startswith("1.3")
    else:
        is_like_1_1 = version_base == "1.1"
    return "." if is_like_1_1 else None


def version_base_options(version_base: str | None) -> dict[str, Any]:
    """Return the argument ``version_base`` for Hydra's functions, as a dictionary.

    Hydra 1.3 warns if the argument is missing. Hydra 1.4 warns about the value 1.3, which this
    package uses, and about this package's targets in Hydra's configuration.
    """
    import hydra

    if version_base is HYDRAS_OWN:
        return {}
    if version_base != "1.3" or hydra.__version__.startswith("1.3"):
        return {"version_base": version_base}
    targets = r"_target_='(robust_train|hydra_plugins\.robust)"
    warnings.filterwarnings("ignore", rf"hydra.utils.instantiate\(\) resolved {targets}")
    return {}


def register_resolver(name: str, resolver: Callable[..., Any], *, use_cache: bool = False) -> None:
    """Register a resolver with OmegaConf. The function has another name from version 2.4 on."""
    from omegaconf import OmegaConf

    register: Any = OmegaConf.register_resolver
    if "use_cache" not in inspect.signature(register).parameters:
        register = OmegaConf.register_new_resolver
    register(name, resolver, use_cache=use_cache, replace=True)


@contextlib.contextmanager
def intercept_resolvers(
    evaluate: Callable[[str, str, tuple[str, ...], Callable[[], Any]], Any],
) -> Iterator[None]:
    """Call ``evaluate(key, name, arguments, resolve)`` within the block in place of each registered
    resolver.

    Some resolvers read more than their arguments and are left unchanged: those that get the config,
    OmegaConf's own and ``hydra``.
    """
    from omegaconf import OmegaConf
    from omegaconf.basecontainer import BaseContainer

    registered = BaseContainer._resolvers

    def wrap(name: str, resolver: Any) -> Any:
        def wrapper(config: Any, parent: Any, node: Any, values: Any, words: Any) -> Any:
            def resolve() -> Any:
                # OmegaConf's cache identifies an argument by its text, even if it refers to another
                # key, whose value may have changed.
                if any("${" in word for word in words):
                    OmegaConf.get_cache(config)[name].pop(words, None)
                return resolver(config, parent, node, values, words)

            key = str(node._get_full_key(None))
            return evaluate(key, name, tuple(str(value) for value in values), resolve)

        return wrapper

    wrapped = {}
    for name, resolver in registered.items():
        is_builtin = name == "hydra" or name.startswith("oc.")
        if is_builtin or _gets_config(resolver):
            wrapped[name] = resolver
        else:
            wrapped[name] = wrap(name, resolver)
    BaseContainer._resolvers = wrapped
    try:
        yield
    finally:
        BaseContainer._resolvers = registered


def _gets_config(resolver: Callable[..., Any]) -> bool:
    closure = inspect.getclosurevars(resolver).nonlocals
    return any(closure.get(f"pass_{name}") for name in ("parent", "node", "root"))


def nodes_of(config: Any) -> dict[str, object]:
    """Return the nodes of a structured config, which keep their types in another config."""
    return {name: config._get_node(name) for name in config}


def set_nodes(config: Any, nodes: Mapping[str, Any]) -> None:
    """Replace the nodes of a structured config by other nodes of any type, in this order."""
    config._content.clear()
    for name, node in nodes.items():
        node._set_parent(config)
        node._set_key(name)
        config._content[name] = node
