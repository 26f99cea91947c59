"""Handles the config of a Hydra project that was not made for this package.

The package's keys are in the group ``robust``, so that the project may use any name at its root.
The batch size that a job adapts is the project's own key. It is found by its name, or because a
value under ``robust`` refers to it, as in the example. The launcher then writes each attempt's
choice to that key. The launcher and attempts use this module::

    robust:
      training:
        batch_size: ${data.train.batch_size}
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from robust_train.config.schema import ACCUMULATION, BATCH, TrainingConfig
from robust_train.model.errors import ConfigError

GROUP = "robust"

_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "batch_size": (
        (
            "micro_batch",
            "micro_batch_size",
            "micro_batch_size_per_gpu",
            "micro_batch_size_per_device",
            "per_device_train_batch_size",
            "per_device_batch_size",
            "per_gpu_train_batch_size",
            "batch_size_per_gpu",
            "batch_size_per_device",
            "samples_per_gpu",
        ),
        (
            "batch_size",
            "train_batch_size",
            "batchsize",
            "bsz",
            "bs",
            "mini_batch_size",
            "mini_batch",
        ),
        ("batch",),
    ),
    "num_workers": (("num_workers",),),
    "gradient_accumulation_steps": (("accumulate_grad_batches", "gradient_accumulation_steps"),),
    # No name is specific enough, so only a key to which the group `robust` refers counts.
    "gradient_checkpointing": ((),),
}
"""Projects' names, in lower case, for the keys under ``training`` that each attempt chooses.

The names are in groups of decreasing precision. Next to a name of an earlier group, a name of a
later group means something else: ``train_batch_size`` next to ``train_micro_batch_size_per_gpu`` is
the batch of all devices. ``batch`` has other meanings too, so it counts only in a config without
another name. The name of an algorithm may precede a mini-batch or micro-batch (``ppo_mini_batch``),
and is removed before names are compared.
"""

_PART_OF_BATCH = re.compile(r".*(mini|micro)_?batch_?(?=size|per|$)")
_DIVIDED = ("mini_batch", "micro_batch")

# Words in the name of a key or its group that show its purpose.
_OF_EVALUATION = re.compile(
    r"(eval|valid)[a-z]*|predict(ion|ions|ing)?|infer(ence)?|generat(e|ion)|"
    r"(val|dev|test)(s|ing|set|data|loader|dataset|dataloader)?"
)
_OF_TRAINING = re.compile(r"train[a-z]*")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Keys with which the items of a list name their purpose.
_LABELS = ("name", "split", "subset", "stage", "phase", "mode")

_REFERENCE = re.compile(r"\$\{([^\s${}:,]+)\}")


def builds_on_ours(cfg: DictConfig) -> bool:
    """Return whether a config has this package's keys at its root, by ``defaults: [robust]``."""
    kind = OmegaConf.get_type(cfg, "training") if "training" in cfg else None
    return isinstance(kind, type) and issubclass(kind, TrainingConfig)


def with_group(cfg: DictConfig) -> DictConfig:
    """Return a project's config with the group ``robust``, which is added if it is missing."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.setdefault(GROUP, {})
    return cfg


def ours(cfg: DictConfig) -> DictConfig:
    """Return the part of a config with this package's keys: its group ``robust``, or its root if it
    has no such group."""
    group = cfg.get(GROUP)
    return group if isinstance(group, DictConfig) else cfg


def is_theirs(cfg: DictConfig) -> bool:
    """Return whether a config belongs to a project, with this package's keys in a group."""
    return ours(cfg) is not cfg


def without_ours(cfg: DictConfig) -> DictConfig:
    """Return the config for a project's code, without the group ``robust``."""
    if not is_theirs(cfg):
        return cfg
    cfg = cfg.copy()
    with read_write(cfg), open_dict(cfg):
        del cfg[GROUP]
    return cfg


def defaults_for_theirs(cfg: DictConfig) -> dict[str, Any]:
    """Return defaults for the group ``robust`` that refer to the project's own keys.

    Raises:
        ConfigError: it is unclear which of the project's keys is the batch, or the group has
            another value for it.
    """
    # A value that the project does not let us change is not a remedy.
    training: dict[str, Any] = {"num_workers": 0}
    given = _training_group(cfg)
    for name in _NAMES:
        value = given.get(name)
        paths = _find_keys(cfg, name)
        if value is None and len(paths) == 1:
            training[name] = f"${{{paths[0]}}}"
        elif name == "batch_size":
            _check_batch(cfg, value, paths)
    batch = training.get("batch_size")
    if not batch:
        batch = given.get("batch_size")
    if batch is None:
        batch = training["batch_size"] = 1
    defaults: dict[str, Any] = {"training": training}
    reference = _REFERENCE.fullmatch(str(batch))
    size = OmegaConf.select(cfg, reference[1]) if reference else batch
    if isinstance(size, int):
        defaults["min_batch_size"] = max(1, min(4, size))
    return defaults


def _check_batch(cfg: DictConfig, value: Any, paths: list[str]) -> None:
    """Refuse a batch under ``robust`` that does not match the project's keys ``paths``."""
    key = f"{GROUP}.{BATCH}"
    if not paths or _REFERENCE.fullmatch(str(value)):
        return
    if len(paths) > 1:
        raise ConfigError(
            f"{key}: the config has {', '.join(paths)}; choose the key that the training uses: "
            f"'{key}=${{{paths[0]}}}'"
        )
    theirs = OmegaConf.select(cfg, paths[0])
    if isinstance(value, int) and value != theirs:
        raise ConfigError(f"{key}={value}: the project has {paths[0]}={theirs}; set that")


def lightning_of(cfg: DictConfig) -> str | None:
    """Return the name of the Lightning package whose objects a project's config creates, or None.
    Its ``fit`` is replaced by ours."""
    content: Any = OmegaConf.to_container(without_ours(cfg), resolve=False)
    targets = [leaf.value for leaf in _leaves(content, "") if leaf.path.endswith("_target_")]
    packages = {str(target).partition(".")[0] for target in targets}
    for name in ("lightning", "pytorch_lightning"):
        if name in packages:
            return name
    return None


def write_to_theirs(cfg: DictConfig, chosen: dict[str, Any]) -> None:
    """Write an attempt's choices to the project's own keys."""
    for name in _NAMES:
        path = _find_key(cfg, name)
        if path is not None and name in chosen:
            with read_write(cfg):
                OmegaConf.update(cfg, path, chosen[name])


def their_keys(cfg: DictConfig) -> dict[str, str] | None:
    """Return the project's key for each of our keys that attempts choose, or None for a config that
    has our keys at its root."""
    if not is_theirs(cfg):
        return None
    keys = {}
    for name in _NAMES:
        path = _find_key(cfg, name)
        if path is not None:
            keys[f"training.{name}"] = path
    if lightning_of(cfg):
        # Our `fit` accumulates gradients, so the project needs no key for it.
        keys.setdefault(ACCUMULATION, f"{GROUP}.{ACCUMULATION}")
    return keys


def _find_key(cfg: DictConfig, name: str) -> str | None:
    """Return the project's key for a key of this package.

    It is the key to which ours refers, or the project's only key with that meaning.
    """
    reference = _REFERENCE.fullmatch(str(_training_group(cfg).get(name)))
    if reference is not None:
        return reference[1]
    paths = _find_keys(cfg, name)
    return paths[0] if len(paths) == 1 else None


def resolve_values(cfg: DictConfig) -> DictConfig:
    """Return a copy with all values resolved, except those in a project's config that only the
    project's code can resolve."""
    cfg = cfg.copy()
    with read_write(cfg), open_dict(cfg):
        _resolve(cfg)
    return cfg


def _resolve(node: DictConfig | ListConfig) -> None:
    names: Any = list(node) if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        with contextlib.suppress(OmegaConfBaseException):
            if OmegaConf.is_missing(node, name):
                continue
            value = node[name]
            if OmegaConf.is_interpolation(node, name):
                node[name] = value
                value = node[name]
            if isinstance(value, (DictConfig, ListConfig)):
                _resolve(value)


def _training_group(cfg: DictConfig) -> dict[str, Any]:
    """Return the content of ``robust.training``, unresolved."""
    group: Any = OmegaConf.to_container(ours(cfg), resolve=False)
    training = group.get("training")
    return training if isinstance(training, dict) else {}


def _find_keys(cfg: DictConfig, name: str) -> list[str]:
    """Return a project's keys with the meaning of ``training.<name>``.

    Keys of evaluation never count, and keys of training are preferred. Keys that refer to the same
    number are one key.
    """
    content: Any = OmegaConf.to_container(without_ours(cfg), resolve=False)
    leaves = list(_leaves(content, ""))
    values = {leaf.path: leaf.value for leaf in leaves}
    names = {known_name for group in _NAMES[name] for known_name in group}
    candidates = [leaf for leaf in leaves if leaf.name in names and not leaf.is_for(_OF_EVALUATION)]
    candidates = _drop_less_precise(candidates, _NAMES[name])
    # Next to a mini-batch, "train" may belong to the larger batch from which it is drawn.
    is_divided = any(leaf.name.startswith(_DIVIDED) for leaf in candidates)
    ranks: dict[str, tuple[bool, bool]] = {}
    for leaf in candidates:
        path = _follow_references(leaf.path, values)
        if _is_integer(cfg, path):
            is_of_training = is_divided or leaf.is_for(_OF_TRAINING)
            # A computed value counts only if no key has a number.
            is_number = type(values.get(path)) is int
            rank = (is_of_training, is_number)
            ranks[path] = max(rank, ranks.get(path, rank))
    best = max(ranks.values(), default=None)
    return [path for path, rank in ranks.items() if rank == best]


@dataclass(frozen=True)
class _Leaf:
    """A value of a config that is neither a group nor a list."""

    path: str
    value: Any  # unresolved
    # The labels of the list's item that contains it, such as the value of ``name``.
    labels: tuple[str, ...] = ()

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        key = self.path.rpartition(".")[2].lower()
        return _PART_OF_BATCH.sub(r"\1_batch_", key).rstrip("_")

    def is_for(self, purpose: re.Pattern[str]) -> bool:
        """Return whether a part of the path, or a label, has a word of this purpose. A part that
        contains ``train`` always belongs to training."""
        for part in (*self.path.split("."), *self.labels):
            words = [word.lower() for word in _WORD.findall(part)]
            is_of_training = any(_OF_TRAINING.fullmatch(word) for word in words)
            if is_of_training and purpose is not _OF_TRAINING:
                continue
            if any(purpose.fullmatch(word) for word in words):
                return True
        return False


def _drop_less_precise(leaves: list[_Leaf], groups: tuple[tuple[str, ...], ...]) -> list[_Leaf]:
    """Remove the keys that mean something else because a key with a more precise name exists."""
    most_precise, *others = groups
    parents = {leaf.parent for leaf in leaves if leaf.name in most_precise}
    kept = [leaf for leaf in leaves if leaf.name in most_precise or leaf.parent not in parents]
    if len(others) < 2:
        return kept
    certain = [leaf for leaf in kept if leaf.name not in others[-1]]
    return certain or kept


def _follow_references(path: str, values: Mapping[str, Any]) -> str:
    """Return the key at the end of a chain of references, or ``path`` if its value is not a
    reference. References to keys of evaluation are not followed."""
    seen = [path]
    while True:
        reference = _REFERENCE.fullmatch(str(values.get(seen[-1])))
        if reference is None:
            return seen[-1]
        following = _make_absolute(reference[1], seen[-1])
        if following in seen or _Leaf(following, None).is_for(_OF_EVALUATION):
            return seen[-1]
        seen.append(following)


def _is_integer(cfg: DictConfig, path: str) -> bool:
    with contextlib.suppress(OmegaConfBaseException):
        return type(OmegaConf.select(cfg, path)) is int
    return False


def _make_absolute(reference: str, path: str) -> str:
    """Return the absolute key for a reference at ``path``, which may start with dots."""
    name = reference.lstrip(".")
    levels = len(reference) - len(name)
    if not levels:
        return reference
    above = re.findall(r"[^.[\]]+", path)[:-levels]
    return ".".join([*above, name])


def _leaves(content: Any, path: str, labels: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    """Yield the values of a config below a path, including those in lists."""
    if isinstance(content, list):
        for number, item in enumerate(content):
            entries = item if isinstance(item, dict) else {}
            own_labels = [entries[key] for key in _LABELS if isinstance(entries.get(key), str)]
            yield from _leaves(item, f"{path}[{number}]", (*labels, *own_labels))
    elif isinstance(content, dict):
        for key, value in content.items():
            if path:
                yield from _leaves(value, f"{path}.{key}", labels)
            elif key != "hydra":
                yield from _leaves(value, str(key), labels)
    else:
        yield _Leaf(path, content, labels)
