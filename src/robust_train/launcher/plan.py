"""Plans a launch: computes everything that is known before its first effect, as a frozen value.

``entry.launch`` calls :func:`plan_job` in the launcher's process, and :class:`.guest.RankDriver`
calls it in each rank of an engine's job. The rest of the launcher reads the :class:`Plan`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from robust_train.config.checks import checked, hide_urls
from robust_train.config.placeholders import placeholders_in
from robust_train.config.projects import ours, resolve_values
from robust_train.config.schema import RobustConfig
from robust_train.config.trainers import Trainer, TrainerRef, job_name_of, target_of
from robust_train.config.words import Words
from robust_train.folder.hydra_state import chosen_folder, owns_terminal, run_folder, sweep_folder
from robust_train.folder.identity import refuse_other_version
from robust_train.folder.resolvers import Resolvers, resolvers_of
from robust_train.folder.resume_command import resume_command
from robust_train.gpu.visible import numbers_gpus
from robust_train.host.allocator import exported_expandable_segments, is_wsl
from robust_train.model.feature import Feature, load_named
from robust_train.policy.decide import Remedies
from robust_train.policy.settings import PolicySettings


@dataclass(frozen=True)
class Surroundings:
    """What surrounds a job: a sweep, or a terminal that no other job uses."""

    sweep_folder: Path | None = None
    owns_terminal: bool = False

    @property
    def in_sweep(self) -> bool:
        """Whether the job belongs to a sweep."""
        return self.sweep_folder is not None


@dataclass(frozen=True)
class Plan:
    """The plan of one launch of a job."""

    config: RobustConfig
    cfg: DictConfig  # the composed config
    resolved_cfg: DictConfig  # the same config, with every interpolation resolved that can be
    trainer: Trainer | str
    trainer_ref: TrainerRef
    name: str  # the job's name, for people
    run_dir: Path
    surroundings: Surroundings
    resolvers: Resolvers  # keep values such as `${now:…}` the same in all attempts of a job
    policy: PolicySettings
    values_used: frozenset[str]  # the values of an attempt that reach its script
    numbers_gpus: bool  # whether attempts get GPU numbers in CUDA_VISIBLE_DEVICES, not UUIDs
    # This process's environment, without the notification URLs that the config names.
    environ: dict[str, str]
    remedies: Remedies
    features: tuple[Feature, ...] = ()
    resume_command: str | None = None  # None if no command of this package resumes the job

    @property
    def may_resume(self) -> bool:
        """Whether a later launch resumes the job. A sweep resumes its jobs itself."""
        return self.config.resume and not self.surroundings.in_sweep

    @property
    def words(self) -> Words:
        """Words the keys in messages as the user's project names them."""
        return Words(self.config.theirs)


def plan_job(
    trainer: Trainer | None,
    cfg: DictConfig,
    run_dir: str | Path | None = None,
    *,
    remedies: Remedies,
    features: tuple[Feature, ...] = (),
    guest: bool = False,
    refuse: Callable[[RobustConfig], None] = lambda config: None,
) -> Plan:
    """Plan a job whose config is complete, and create its run folder.

    Args:
        trainer: a callable, its dotted path, or None for ``trainer._target_``.
        cfg: the composed config. The plan keeps a copy, because a program may reuse its config for
            another launch.
        run_dir: the run folder, or None for Hydra's folder or a new folder.
        remedies: the remedies to try after a failure.
        features: the features that take part, in the order of evidence.
        guest: whether an engine such as torchrun started this process and restarts it.
        refuse: called with the config. It raises ConfigError if this launch cannot support the
            config.

    Raises:
        ConfigError: the config, trainer or run folder cannot be used.
    """
    cfg = cfg.copy()
    environ = dict(os.environ)
    hide_urls(cfg, environ)
    is_resumed = ours(cfg).get("resume") is not False
    resolvers = resolvers_of(chosen_folder(run_dir) if is_resumed else None)
    with resolvers.kept():
        config = checked(cfg)
        resolved_cfg = resolve_values(cfg)
    if guest:
        config = replace(config, isolation="none")
    refuse(config)
    if not trainer:
        trainer = target_of(config)
    used = find_values_used(cfg, config)
    name = job_name_of(config, trainer)
    trainer_ref = TrainerRef.of(trainer, inline=config.runs_inline)
    policy = make_policy_settings(config, used)
    folder = run_folder(run_dir, name)
    refuse_other_version(folder, resume=config.resume)
    command = None
    if config.resume and not guest:
        command = resume_command(folder, is_named=run_dir is not None)
    plan = Plan(
        config=config,
        cfg=cfg,
        resolved_cfg=resolved_cfg,
        trainer=trainer,
        trainer_ref=trainer_ref,
        name=name,
        run_dir=folder,
        surroundings=Surroundings(sweep_folder(), owns_terminal(config)),
        resolvers=resolvers,
        policy=policy,
        values_used=frozenset(used),
        numbers_gpus=numbers_gpus(environ, reads_uuids=config.traits.reads_uuids),
        environ=environ,
        remedies=remedies,
        features=features,
        resume_command=command,
    )
    for feature in features:
        if feature.plans:
            plan = load_named(feature.plans)(plan)
    return plan


def find_values_used(cfg: DictConfig, config: RobustConfig) -> set[str]:
    """Return the values of an attempt that reach its script.

    A script's command names them by placeholders such as ``{checkpoint}``, or by interpolations
    such as ``${training.batch_size}``.
    """
    trainer = config.trainer
    words = " ".join((trainer.argv or ()) + trainer.resume_argv)
    used = placeholders_in(words)
    unresolved = str(OmegaConf.to_container(ours(cfg).trainer, resolve=False))
    for key in ("batch_size", "gradient_accumulation_steps"):
        if f"training.{key}}}" in unresolved:
            used.add(key)
    # A script can divide the effective batch by either value to get the other.
    if used >= {"effective_batch_size", "gradient_accumulation_steps"}:
        used.add("batch_size")
    if used >= {"effective_batch_size", "batch_size"}:
        used.add("gradient_accumulation_steps")
    return used


def make_policy_settings(
    config: RobustConfig,
    used: Collection[str],  # the values of an attempt that reach its script
) -> PolicySettings:
    """Return the settings that a job's decisions depend on."""
    # A setting that the user exported takes precedence, and WSL does not support the feature.
    may_use_segments = exported_expandable_segments(os.environ) is None and not is_wsl()
    return PolicySettings.of(
        config, environ=os.environ, may_use_expandable_segments=may_use_segments, used=used
    )
