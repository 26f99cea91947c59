"""Which features a trainer supports: those that it declares, or whose config keys it has read.

The runner uses it in the process that trains. :func:`watch_reads` replaces some values of the
config by :class:`WatchedValue`, which records its name when the trainer reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from omegaconf import AnyNode, Container, DictConfig

from robust_train.model.errors import UserError
from robust_train.readable import suggest

CHECKPOINTING = "gradient_checkpointing"
WORKERS = "num_workers"
_KEYS_OF_FEATURES = {CHECKPOINTING: CHECKPOINTING, WORKERS: "workers"}
"""The features that a trainer may declare in ``supports``. A trainer that declares nothing supports
a feature if it has read a key whose name contains the text."""


def find_support(trainer: object, has_read: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return a function that returns whether the trainer supports a feature.

    The trainer may declare its features by an attribute: ``train.supports =
    {"gradient_checkpointing"}``. Otherwise the keys count that it has read.

    Raises:
        UserError: the trainer declares a feature that does not exist.
    """
    declared = getattr(trainer, "supports", None)
    if not isinstance(declared, (set, frozenset, list, tuple)):
        return lambda feature: has_read(_KEYS_OF_FEATURES[feature])
    for name in declared:
        if name not in _KEYS_OF_FEATURES:
            hint = suggest(str(name), _KEYS_OF_FEATURES)
            raise UserError(f"supports={name!r}: no such feature; {hint}")
    return frozenset(declared).__contains__


class WatchedValue(AnyNode):
    """A config value that records its name when it is read.

    Attributes:
        names: the names of all values that were read in this process.
    """

    names: ClassVar[set[str]] = set()

    def _value(self) -> Any:
        WatchedValue.names.add(str(self._key()))
        return super()._value()

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedValue:
        copied = WatchedValue()
        self._deepcopy_impl(copied, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as a plain value, so that a checkpoint can be read without this class."""
        return AnyNode, (), self.__getstate__()


def watch_reads(
    cfg: DictConfig, batch_size: object, accumulation: object = None
) -> Callable[[str], bool]:
    """Return a function that returns whether a key whose name contains a text was read.

    The watched keys are ``…batch_size`` and ``…accum…`` if they have these values, ``…workers``,
    ``gradient_checkpointing`` and ``training.lr``. References to other keys are resolved by now.
    """
    containers: list[Any] = [cfg]
    # A list of workers has a figure for each loader. Reading its items is not watched, so the list
    # counts as read.
    read = set[str]()
    while containers:
        container = containers.pop(0)
        for key, node in list(_items_of(container)):
            name = str(key)
            if isinstance(node, Container):
                if name.endswith("workers"):
                    read.add(name)
                if not (node._is_none() or node._is_missing()):
                    containers.append(node)
                continue
            is_watched = (
                name.endswith("workers")
                or name == CHECKPOINTING
                or (name == "lr" and container._key() == "training")
                or (name.endswith("batch_size") and node == batch_size)
                or ("accum" in name and node == accumulation)
            )
            if is_watched:
                watched = WatchedValue(node._value(), key=key, parent=container)
                container._content[key] = watched
    WatchedValue.names.clear()
    WatchedValue.names.update(read)
    return _was_read


def _items_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and nodes of a dictionary or a list of a config."""
    content = container._content
    if isinstance(content, dict):
        yield from content.items()
    else:
        yield from enumerate(content or ())


def _was_read(text: str) -> bool:
    return any(text in name for name in WatchedValue.names)
