"""Attempts as tests describe them."""

import functools
import re
from dataclasses import fields, replace

from omegaconf import DictConfig

from robust_train.assembly import FEATURES, load_remedies
from robust_train.config.attempt import AttemptRequest
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.keys import schema
from robust_train.config.schema import RobustConfig, TrainerConfig, TrainingConfig
from robust_train.config.trainers import TrainerRef
from robust_train.features.retry_rules.model import RetryKeys, decide_by_rule, with_rule
from robust_train.model.attempt import Attempt
from robust_train.model.events import Failed, ScriptEnded
from robust_train.model.exit import Exit
from robust_train.model.failure import Evidence, Failure
from robust_train.model.gpu import GpuInfo
from robust_train.model.parts import parts_like
from robust_train.model.spec import AttemptSpec, Decision
from robust_train.policy.context import Offers
from robust_train.policy.decide import decide
from robust_train.policy.settings import PolicySettings
from robust_train.readable import GIB


def policy(
    batch_size=64,
    gradient_accumulation_steps=1,
    *,
    num_workers=0,
    expandable_segments=True,
    may_use_expandable_segments=True,
    can_checkpoint=False,
    gradient_checkpointing=None,
    reports_start=False,
    rules=(),
    **keys,
) -> PolicySettings:
    """What decisions depend on in a job with these keys; ``reports_start``: of our trainer."""
    target = "robust_train.vision.trainer.train" if reports_start else None
    training = TrainingConfig(
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        num_workers=num_workers,
        gradient_checkpointing=gradient_checkpointing,
    )
    kernels = {item.name for item in fields(RobustConfig)}
    config = RobustConfig(
        training=training,
        trainer=TrainerConfig(target),
        of_features=(RetryKeys(rules),),
        **{"min_gpu_memory_mb": 0, **{name: keys[name] for name in keys if name in kernels}},
    )
    for name in keys.keys() - kernels:
        config = with_key(config, name, keys[name])
    settings = PolicySettings.of(
        config,
        may_use_expandable_segments=may_use_expandable_segments,
        can_checkpoint=can_checkpoint,
    )
    requested = with_figures(settings.asked, expandable_segments=expandable_segments)
    return replace(settings, asked=requested)


def with_key(config, name, value) -> RobustConfig:
    """The config with another value of a key at the root that a feature declares."""
    having = (keys for keys in schema().features if not keys.group and hasattr(keys, name))
    owner = next(having)
    return config.having(replace(config.of(owner), **{name: value}))


KEYS_OF_A_PROJECT = {
    "training.batch_size": "data.batch_size",
    "training.gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "training.num_workers": "data.num_workers",
}


@functools.cache
def _key_at_the_root():
    def names(node, prefix=""):
        for name, value in node.items_ex(resolve=False):
            if isinstance(value, DictConfig):
                yield from names(value, f"{prefix}{name}.")
            else:
                yield prefix + name + ("" if "." in prefix or "_" in name else "=")

    listed = "|".join(map(re.escape, names(complete({}))))
    return re.compile(rf"(?<![\w./={{-])(?:{listed})(?!\w)")


def keys_at_the_root(text) -> list[str]:
    """The keys of ours that a message names without the group ``robust``."""
    return _key_at_the_root().findall(text)


def gpu(index: int, free_gib: float, unusable: str | None = None) -> GpuInfo:
    """A GPU of 80 GiB."""
    bus, free = f"0000:0{index}:00.0", int(free_gib * GIB)
    return GpuInfo(f"GPU-{index}", "A100", index, bus, 80 * GIB, free, 0, unusable=unusable)


def failed(
    spec,
    kind,
    evidence=None,
    *,
    message="",
    rank=None,
    exit_code=None,
    output="",
    exceptions=(),
    **record,
) -> Attempt:
    """An attempt that failed; ``record`` are fields of it, or of the notes that features add."""
    text = message or f"a {kind.value} message"
    failure = Failure(kind, text, evidence or Evidence(), rank=rank)
    return built(
        Attempt,
        record.pop("number", 1),
        spec,
        seconds=1.0,
        failure=failure,
        ending=Failed(failure, exceptions=exceptions),
        script=None if exit_code is None else ScriptEnded(exit_code, 1),
        exit=Exit(output=output),
        **record,
    )


def built(cls, *positional, **given):
    """A record with these fields, of its own or of the parts that features add to it."""
    names = {field.name for field in fields(cls)}
    record = cls(*positional, **{name: given.pop(name) for name in names & given.keys()})
    return with_figures(record, **given)


def with_figures(record, **given):
    """The record with these fields of features' parts."""
    parts = []
    for kind in parts_like(record.kind_of_part):
        names = [field.name for field in fields(kind) if field.name in given]
        parts.append(replace(record.of(kind), **{name: given.pop(name) for name in names}))
    assert not given, "neither the record nor a feature has such fields"
    return record.having(*parts)


def decided(settings, history, gpus=(), held=()) -> Decision:
    """What the launcher decides after these attempts."""
    earlier: tuple[Attempt, ...] = ()
    for attempt in history:
        earlier += (with_rule(settings, earlier, attempt),)
    ruled = decide_by_rule(settings, earlier)
    return ruled or decide(settings, load_remedies(), earlier, Offers(gpus, held))


def attempt_request(run_dir, path="own.train", keys=(), **more):
    """What a process is given for the first attempt of a job with these keys of the config."""
    cfg = complete(dict(keys))
    fields = {
        "hydra_cfg": None,
        "config": checked(cfg),
        "spec": AttemptSpec((), 8, 1),
        "attempt": 1,
        "run_dir": run_dir,
        "resume_checkpoint": None,
        "environ": {},
        "cwd": str(run_dir),
        "features": tuple(feature.attempt for feature in FEATURES if feature.attempt),
        "watches": tuple(feature.watch for feature in FEATURES if feature.watch),
    }
    return AttemptRequest(TrainerRef(path), cfg, **{**fields, **more})
