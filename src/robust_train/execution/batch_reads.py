"""Whether a trainer reads ``training.batch_size``; if not, its samples a second are unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from omegaconf import AnyNode, DictConfig


class NotedValue(AnyNode):
    """A value of a config that notes when one like it was read in this process."""

    was_read: ClassVar[bool] = False

    def _value(self) -> Any:
        NotedValue.was_read = True
        return super()._value()


def note_reads(cfg: DictConfig, batch_size: object) -> Callable[[], bool]:
    """Return what tells from now on whether a key ``…batch_size`` of this value was read: those
    that refer to ``training.batch_size`` are resolved by now."""
    parts = [cfg]
    for part in parts:
        content = part._content if isinstance(part._content, dict) else {}
        for name, node in content.items():
            if isinstance(node, DictConfig):
                parts.append(node)
            elif str(name).endswith("batch_size") and node == batch_size:
                content[name] = NotedValue(batch_size, key=name, parent=part)
    NotedValue.was_read = False
    return lambda: NotedValue.was_read
