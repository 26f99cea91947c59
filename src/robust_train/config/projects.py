"""The config of a Hydra project that was not made for this package.

The package's keys are in its group ``robust``, so the project may use any name at its root, and the
batch size that a job adapts is the project's own key. The launcher and attempts use this module. If
a value under ``robust`` refers to a project's key, that key is set for each attempt::

    robust:
      training:
        batch_size: ${data.train.batch_size}
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from robust_train.config.keys import schema
from robust_train.config.schema import ACCUMULATION, BATCH, WORKERS, TrainingConfig
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError, NoDeviceError, UserError
from robust_train.model.spec import Decision, Retry

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
    # No name is specific enough, so only a key counts that the group `robust` refers to.
    "gradient_checkpointing": ((),),
}
"""Projects' names for the keys under ``training`` that each attempt chooses, in lower case.

Next to a name of an earlier group, a name of a later group means something else:
``train_batch_size`` next to ``train_micro_batch_size_per_gpu`` is the batch of all devices.
``batch`` is also used for other things, so it counts only in a config without another name. A
mini-batch or micro-batch may have its algorithm in front of it, and is written as two words here.
"""

_PART_OF_BATCH = re.compile(r".*(mini|micro)_?batch_?(?=size|per|$)")
_DIVIDED = ("mini_batch", "micro_batch")

_OF_EVALUATION = re.compile(
    r"(eval|valid)[a-z]*|predict(ion|ions|ing)?|infer(ence)?|generat(e|ion)|"
    r"(val|dev|test)(s|ing|set|data|loader|dataset|dataloader)?"
)
_OF_TRAINING = re.compile(r"train[a-z]*")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_LABELS = ("name", "split", "subset", "stage", "phase", "mode")
"""Keys by which the items of a list name their purpose."""

_IN_WORDS = {
    BATCH: "batch size",
    ACCUMULATION: "gradient accumulation",
    WORKERS: "data-loader workers",
}
"""The names of these keys for a project's config without such keys."""

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
    """Return the part of a config with this package's keys: its group ``robust``, else its root."""
    group = cfg.get(GROUP)
    return group if isinstance(group, DictConfig) else cfg


def is_theirs(cfg: DictConfig) -> bool:
    """Return whether a config belongs to a project, with this package's keys in a group."""
    return ours(cfg) is not cfg


def without_ours(cfg: DictConfig) -> DictConfig:
    """Return the config for a project's code: the config as it would be without this package."""
    if not is_theirs(cfg):
        return cfg
    cfg = cfg.copy()
    with read_write(cfg), open_dict(cfg):
        del cfg[GROUP]
    return cfg


def defaults_for_theirs(cfg: DictConfig) -> dict[str, Any]:
    """Return defaults for the group ``robust`` from a project's config, whose batch counts.

    Raises:
        ConfigError: it is unclear which of the project's keys is the batch, or the group has
            another value for it.
    """
    # A value that the project does not let us change is not a remedy.
    training: dict[str, Any] = {"num_workers": 0}
    given = _given(cfg)
    for name in _NAMES:
        value = given.get(name)
        paths = _paths(cfg, name)
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
    key = f"{GROUP}.{BATCH}"
    if not paths or _REFERENCE.fullmatch(str(value)):
        return
    if len(paths) > 1:
        raise ConfigError(
            f"{key}: there are {', '.join(paths)}; say which the training uses: "
            f"'{key}=${{{paths[0]}}}'"
        )
    theirs = OmegaConf.select(cfg, paths[0])
    if isinstance(value, int) and value != theirs:
        raise ConfigError(f"{key}={value}: the project has {paths[0]}={theirs}; set that")


def lightning_of(cfg: DictConfig) -> str | None:
    """Return the Lightning package whose objects a project's config creates, and whose ``fit`` is
    replaced, or None if it creates none."""
    content: Any = OmegaConf.to_container(without_ours(cfg), resolve=False)
    made = {
        str(leaf.value).partition(".")[0]
        for leaf in _leaves(content, "")
        if leaf.path.endswith("_target_")
    }
    names = ("lightning", "pytorch_lightning")
    return next((name for name in names if name in made), None)


def write_to_theirs(cfg: DictConfig, chosen: dict[str, Any]) -> None:
    """Write an attempt's choices to the project's own keys."""
    for name in _NAMES:
        path = _path(cfg, name)
        if path is not None and name in chosen:
            with read_write(cfg):
                OmegaConf.update(cfg, path, chosen[name])


def their_keys(cfg: DictConfig) -> dict[str, str] | None:
    """Return the project's key for each key that attempts choose, or None for any other config."""
    if not is_theirs(cfg):
        return None
    keys = {}
    for name in _NAMES:
        path = _path(cfg, name)
        if path is not None:
            keys[f"training.{name}"] = path
    if lightning_of(cfg):  # our `fit` accumulates
        keys.setdefault(ACCUMULATION, f"{GROUP}.{ACCUMULATION}")
    return keys


@dataclass(frozen=True)
class Words:
    """Words messages with each key as its user writes it. ``theirs`` are :func:`their_keys`."""

    theirs: Mapping[str, str] | None

    @property
    def of_log(self) -> Callable[[str], str] | None:
        """A function that changes a line of the log, or None if lines stay as they are."""
        return None if self.theirs is None else self.text

    @contextlib.contextmanager
    def of_errors(self) -> Iterator[None]:
        """Reword the errors that end a job, so that they name keys as its user writes them."""
        try:
            yield
        except (ConfigError, NoDeviceError, UserError) as error:
            error.args = (self.text(str(error)),)
            raise

    def text(self, text: str, quoted: str = "") -> str:
        """Reword a message. The part ``quoted`` comes from elsewhere and stays."""
        theirs = self.theirs
        if theirs is None:
            return text
        if quoted:
            return quoted.join(map(self.text, text.split(quoted)))

        def name(match: re.Match[str]) -> str:
            key = match[0]
            is_set = text[match.end() :].startswith("=")
            their_key = theirs.get(key)
            if their_key:
                return their_key
            our_key = f"{GROUP}.{key}"
            return our_key if is_set else _IN_WORDS.get(key, our_key)

        return _our_keys().sub(name, text)

    def retry(self, retry: Retry, quoted: str = "") -> Retry:
        """Reword a decision to retry. ``quoted`` is the failure's message."""
        otherwise = retry.otherwise
        if otherwise is not None:
            otherwise = self.decision(otherwise, quoted)
        return replace(
            retry,
            reason=self.text(retry.reason, quoted),
            warning=self.text(retry.warning, quoted),
            otherwise=otherwise,
        )

    def decision(self, decision: Decision, quoted: str = "") -> Decision:
        """Reword any decision. ``quoted`` is the failure's message."""
        if isinstance(decision, Retry):
            return self.retry(decision, quoted)
        return replace(decision, reason=self.text(decision.reason, quoted))

    def attempt(self, attempt: Attempt) -> Attempt:
        """Reword the advice of an attempt, and its message if this package wrote it."""
        failure = attempt.failure
        if failure is None or self.theirs is None:
            return attempt
        message = failure.message
        if failure.evidence.library == "robust_train":
            message = self.text(message)
        advice = tuple(map(self.text, failure.advice))
        return replace(attempt, failure=replace(failure, message=message, advice=advice))


@cache
def _our_keys() -> re.Pattern[str]:
    """Return a pattern for the keys in messages. A key that is an English word matches only as
    ``key=``, and nothing matches in a placeholder, a path or a longer key."""
    names = [
        re.escape(name) + ("" if re.search("[._]", name) else "(?==)")
        for name in schema().root.names()
        # Any key there may be the user's.
        if not name.startswith(("model.", "dataset."))
    ]
    return re.compile(rf"(?<![\w./=-])(?<!(?<!\$)\{{)(?:{'|'.join(names)})\b")


def _path(cfg: DictConfig, name: str) -> str | None:
    """Return the project's key for a key of this package: the key that it refers to, or the
    only match."""
    reference = _REFERENCE.fullmatch(str(_given(cfg).get(name)))
    if reference is not None:
        return reference[1]
    paths = _paths(cfg, name)
    return paths[0] if len(paths) == 1 else None


def resolved(cfg: DictConfig) -> DictConfig:
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


def _given(cfg: DictConfig) -> dict[str, Any]:
    """Return the content of ``robust.training``, unresolved."""
    group: Any = OmegaConf.to_container(ours(cfg), resolve=False)
    training = group.get("training")
    return training if isinstance(training, dict) else {}


def _paths(cfg: DictConfig, name: str) -> list[str]:
    """Return a project's keys with this meaning. Among several those of training count, and those
    of evaluation never. Keys that refer to one number are that number's key."""
    content: Any = OmegaConf.to_container(without_ours(cfg), resolve=False)
    leaves = list(_leaves(content, ""))
    values = {leaf.path: leaf.value for leaf in leaves}
    names = set(chain.from_iterable(_NAMES[name]))
    candidates = [leaf for leaf in leaves if leaf.name in names and not leaf.is_for(_OF_EVALUATION)]
    # A computed value counts only if there is no number.
    ranks: dict[str, tuple[bool, bool]] = {}
    named = _without_others(candidates, _NAMES[name])
    # Next to a mini-batch, "train" may stand before the samples that it is drawn from.
    is_divided = any(leaf.name.startswith(_DIVIDED) for leaf in named)
    for leaf in named:
        path = _end_of_references(leaf.path, values)
        if _is_integer(cfg, path):
            of_training = is_divided or leaf.is_for(_OF_TRAINING)
            is_number = type(values.get(path)) is int
            rank = of_training, is_number
            ranks[path] = max(rank, ranks.get(path, rank))
    best = max(ranks.values(), default=None)
    return [path for path, rank in ranks.items() if rank == best]


@dataclass(frozen=True)
class _Leaf:
    """A value of a config that is neither a group nor a list."""

    path: str
    value: Any  # unresolved
    # If it is in a list, the labels by which the item describes itself.
    labels: tuple[str, ...] = ()

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        key = self.path.rpartition(".")[2].lower()
        return _PART_OF_BATCH.sub(r"\1_batch_", key).rstrip("_")

    def is_for(self, purpose: re.Pattern[str]) -> bool:
        """Return whether a part of the path, or a label, has a word of this purpose. A part with
        ``train`` in it always belongs to training."""
        for part in (*self.path.split("."), *self.labels):
            words = [word.lower() for word in _WORD.findall(part)]
            is_of_training = any(map(_OF_TRAINING.fullmatch, words))
            if is_of_training and purpose is not _OF_TRAINING:
                continue
            if any(map(purpose.fullmatch, words)):
                return True
        return False


def _without_others(leaves: list[_Leaf], groups: tuple[tuple[str, ...], ...]) -> list[_Leaf]:
    """Remove the keys that mean something else because a key with a better name exists."""
    first, *others = groups
    of_devices = {leaf.parent for leaf in leaves if leaf.name in first}
    kept = [leaf for leaf in leaves if leaf.name in first or leaf.parent not in of_devices]
    if len(others) < 2:
        return kept
    certain = [leaf for leaf in kept if leaf.name not in others[-1]]
    return certain or kept


def _end_of_references(path: str, values: Mapping[str, Any]) -> str:
    """Return the key that a key refers to, perhaps through others; the key itself if it refers to
    none. Keys of evaluation are not followed."""
    seen = [path]
    while True:
        reference = _REFERENCE.fullmatch(str(values.get(seen[-1])))
        if reference is None:
            return seen[-1]
        following = _from_the_root(reference[1], seen[-1])
        if following in seen or _Leaf(following, None).is_for(_OF_EVALUATION):
            return seen[-1]
        seen.append(following)


def _is_integer(cfg: DictConfig, path: str) -> bool:
    with contextlib.suppress(OmegaConfBaseException):
        return type(OmegaConf.select(cfg, path)) is int
    return False


def _from_the_root(reference: str, path: str) -> str:
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
            said = [entries[key] for key in _LABELS if isinstance(entries.get(key), str)]
            yield from _leaves(item, f"{path}[{number}]", (*labels, *said))
    elif isinstance(content, dict):
        for key, value in content.items():
            if path or key != "hydra":
                yield from _leaves(value, f"{path}.{key}" if path else f"{key}", labels)
    else:
        yield _Leaf(path, content, labels)
