"""Whether a trainer reads ``training.batch_size`` and ``training.num_workers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from omegaconf import AnyNode, DictConfig


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
    """Return a function: whether a key ``…batch_size`` with this value, or ``…num_workers``, has
    been read since. What refers to ``training.batch_size`` is resolved by now."""
    parts: list[Any] = [cfg]
    for part in parts:
        for name, node in part._content.items() if isinstance(part._content, dict) else ():
            if isinstance(node, DictConfig):
                parts.append(node)
            elif str(name).endswith("num_workers") or (
                str(name).endswith("batch_size") and node == batch_size
            ):
                part._content[name] = NotedValue(node._value(), key=name, parent=part)
    NotedValue.names.clear()
    return lambda ending: any(name.endswith(ending) for name in NotedValue.names)
