"""What a trainer supports: what it declares, or the keys of its config that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import AnyNode, Container, DictConfig

from robust_train.model.errors import UserError
from robust_train.readable import meant

if TYPE_CHECKING:
    from robust_train.attempt.run import Run

CHECKPOINTING = "gradient_checkpointing"
WORKERS = "num_workers"
_READS = {CHECKPOINTING: CHECKPOINTING, WORKERS: "workers"}
"""What a trainer may declare in ``supports``, and the end of a key that shows it."""


def declared_features(trainer: object) -> frozenset[str] | None:
    """Return what a trainer declares by an attribute, None if it declares nothing:
    ``train.supports = {"gradient_checkpointing"}``. Raises UserError: there is no such feature."""
    declared = getattr(trainer, "supports", None)
    if not isinstance(declared, (set, frozenset, list, tuple)):
        return None
    for name in declared:
        if name not in _READS:
            raise UserError(
                f"supports={name!r}: no such feature; {meant(str(name), _READS)}"
            )
    return frozenset(declared)


def supports(run: Run, feature: str) -> bool:
    """Return whether the trainer supports a feature: by its declaration, else by what it reads."""
    if run.declared is not None:
        return feature in run.declared
    return run.has_read(_READS[feature])


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
    """Return a function: whether a key with this ending has been read since.

    Noted are ``…batch_size`` with this value (what refers to it is resolved by now), ``…workers``
    and ``gradient_checkpointing``.
    """
    parts: list[Any] = [cfg]
    unknown = set[str]()  # a list, a figure for each of several loaders
    for part in parts:
        is_dict = isinstance(part._content, dict)
        for name, node in (
            part._content.items() if is_dict else enumerate(part._content or ())
        ):
            is_workers = str(name).endswith("workers")
            if isinstance(node, Container):
                parts += [] if node._is_none() or node._is_missing() else [node]
                unknown |= {str(name)} if is_workers else set()
            elif (
                is_workers
                or name == CHECKPOINTING
                or (str(name).endswith("batch_size") and node == batch_size)
            ):
                part._content[name] = NotedValue(node._value(), key=name, parent=part)
    NotedValue.names.clear()
    NotedValue.names.update(unknown)
    return lambda ending: any(name.endswith(ending) for name in NotedValue.names)
