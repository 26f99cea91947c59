"""Whether a trainer reads ``training.batch_size`` and ``training.num_workers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from omegaconf import AnyNode, Container, DictConfig


class NotedValue(AnyNode):
    """A value of a config; notes the names of those that were read in this process."""

    names: ClassVar[set[str]] = set()

    def _value(self) -> Any:
        NotedValue.names.add(str(self._key()))
        return super()._value()

    def __deepcopy__(self, memo: dict[int, Any]) -> NotedValue:
        copied = NotedValue()
        self._deepcopy_impl(copied, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled as any value is: a checkpoint has to be read without this class, too."""
        return AnyNode, (), self.__getstate__()


def note_reads(cfg: DictConfig, batch_size: object) -> Callable[[str], bool]:
    """Return a function: whether a key ``…batch_size`` with this value, or ``…workers``, has been
    read since. What refers to ``training.batch_size`` is resolved by now."""
    parts: list[Any] = [cfg]
    unknown = set[str]()  # a list, a figure for each of several loaders
    for part in parts:
        is_dict = isinstance(part._content, dict)
        for name, node in part._content.items() if is_dict else enumerate(part._content or ()):
            is_workers = str(name).endswith("workers")
            if isinstance(node, Container):
                parts += [] if node._is_none() or node._is_missing() else [node]
                unknown |= {str(name)} if is_workers else set()
            elif is_workers or (str(name).endswith("batch_size") and node == batch_size):
                part._content[name] = NotedValue(node._value(), key=name, parent=part)
    NotedValue.names.clear()
    NotedValue.names.update(unknown)
    return lambda ending: any(name.endswith(ending) for name in NotedValue.names)
