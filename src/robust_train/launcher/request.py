"""Builds the request for one attempt: its config, its environment, and its checkpoint.

:class:`.job.Job` and :class:`.guest.RankDriver` call :func:`build_request` in the launcher's
process. The attempt's process receives the request and runs it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

from robust_train.config.attempt import AttemptRequest, for_attempt, trainer_config
from robust_train.config.values import SET_FOR_HYDRA_VARIABLE
from robust_train.folder.hydra_state import hydra_config
from robust_train.gpu.visible import mask_for
from robust_train.launcher.plan import Plan
from robust_train.model.attempt import Attempt
from robust_train.model.parts import parts_like
from robust_train.model.spec import AttemptSpec, Knob
from robust_train.queue.devices import name_for_trainer


def build_request(
    attempt: Attempt, plan: Plan, requested: AttemptSpec, *, is_first: bool = True
) -> AttemptRequest:
    """Return the request for an attempt that starts.

    Args:
        attempt: the attempt.
        plan: the job's plan.
        requested: the batch and its split that the user requested.
        is_first: whether the attempt is the first of its launch.
    """
    spec = attempt.spec
    config = plan.config
    environ = build_environment(os.environ, spec, by_index=plan.numbers_gpus)
    device = name_for_trainer(spec.gpus, os.environ, own_process=not config.runs_inline)
    own_config = for_attempt(config, spec, device)
    resumed_from = attempt.resumed_from
    with plan.resolvers.kept():
        cfg = trainer_config(plan.cfg, own_config)
    return AttemptRequest(
        trainer=plan.trainer_ref,
        cfg=cfg,
        hydra_cfg=hydra_config(),
        config=own_config,
        spec=spec,
        attempt=attempt.number,
        run_dir=plan.run_dir,
        resume_checkpoint=Path(resumed_from) if resumed_from else None,
        environ=environ,
        cwd=os.getcwd(),
        asked=requested,
        is_first=is_first,
        start_method=_start_method(),
        features=tuple(feature.attempt for feature in plan.features if feature.attempt),
        watches=tuple(feature.watch for feature in plan.features if feature.watch),
    )


def _start_method() -> str | None:
    """Return the program's start method for multiprocessing, None if it has not chosen a method."""
    method = multiprocessing.get_start_method(allow_none=True)
    # A joblib worker uses joblib's own method, which does not exist in other processes.
    if method in multiprocessing.get_all_start_methods():
        return method
    return None


def build_environment(
    environ: Mapping[str, str],  # the launcher's environment
    spec: AttemptSpec,
    *,
    # Whether to number the GPUs, for programs that parse integers. UUIDs are safer, because NVML
    # and CUDA may count differently.
    by_index: bool = False,
) -> dict[str, str]:
    """Return the environment of an attempt, in which only its own GPUs are visible.

    Variables that one of our commands set for its own Hydra are removed.
    """
    for_hydra = environ.get(SET_FOR_HYDRA_VARIABLE, "").split()
    left_out = {SET_FOR_HYDRA_VARIABLE, *for_hydra}
    environ = {name: value for name, value in environ.items() if name not in left_out}
    for kind in parts_like(Knob):
        environ = spec.of(kind).apply_to_environ(environ)
    return {
        **environ,
        "CUDA_VISIBLE_DEVICES": mask_for(spec.gpus, by_index=by_index),
        # With this order, indices that a program prints or parses agree with nvidia-smi.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
