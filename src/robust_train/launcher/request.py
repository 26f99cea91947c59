"""Builds the request for one attempt: its config, its environment, and where it resumes.

:class:`.job.Job` calls :func:`request_for` in the launcher; the attempt's process reads the
request.
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


def request_for(
    attempt: Attempt, plan: Plan, requested: AttemptSpec, *, is_first: bool = True
) -> AttemptRequest:
    """Return the request for an attempt that starts.

    Args:
        attempt: the attempt.
        plan: the job's plan.
        requested: the requested split of the batch.
        is_first: whether the attempt is the first of its launch.
    """
    spec = attempt.spec
    config = plan.config
    environ = attempt_environment(os.environ, spec, by_index=plan.numbers_gpus)
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
    """Return the program's start method for multiprocessing, None if it has not chosen any.

    A joblib worker uses joblib's method, which other processes do not have.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    return method if method in multiprocessing.get_all_start_methods() else None


def attempt_environment(
    environ: Mapping[str, str],  # the launcher's environment
    spec: AttemptSpec,
    *,
    # Number the GPUs, for programs that parse integers. Otherwise use UUIDs, also if NVML and CUDA
    # may count differently.
    by_index: bool = False,
) -> dict[str, str]:
    """Return the launcher's environment for an attempt: only its GPUs (or none) are visible, and
    variables that a command set for its own Hydra are removed."""
    for_hydra = environ.get(SET_FOR_HYDRA_VARIABLE, "").split()
    left_out = {SET_FOR_HYDRA_VARIABLE, *for_hydra}
    environ = {name: value for name, value in environ.items() if name not in left_out}
    for kind in parts_like(Knob):
        environ = spec.of(kind).exported(environ)
    return {
        **environ,
        "CUDA_VISIBLE_DEVICES": mask_for(spec.gpus, by_index=by_index),
        # Then a program that prints or parses indices agrees with nvidia-smi.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
