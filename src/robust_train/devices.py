"""From a config to the device that the first attempt takes, and what else could be taken later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from omegaconf import DictConfig

from robust_train.config import ConfigError
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.live_line import LiveLine
from robust_train.gpu.select import rank
from robust_train.gpu.visible import Visible, visible_gpus
from robust_train.gpu.wait import GpuRequest, NoGpu, wait_for_gpu
from robust_train.types import MIB, GpuInfo, Room

log = logging.getLogger("robust_train")

Device = GpuInfo | None
"""A GPU, or None for the CPU."""

_SETTLE_SECONDS = 5.0
_SETTLE_BAND_BYTES = 256 * MIB


class NoDevice(RuntimeError):
    """No device in time, and the CPU is not allowed."""


def acquire(
    cfg: DictConfig, environ: Mapping[str, str], *, sleep: Callable[[float], None]
) -> Device:
    """The device to start on: waits for a GPU as the config says, falls back as it allows.

    Args:
        cfg: a complete, validated config.
        environ: whose CUDA_VISIBLE_DEVICES bounds the choice.
        sleep: how to wait; whatever it raises ends the waiting.

    Raises:
        NoDevice: nothing suitable, and the CPU is not allowed.
        ConfigError: ``device`` names a GPU that this machine does not have.
    """
    if not cfg.auto_device and cfg.device == "cpu":
        return None
    if cfg.auto_device and cfg.device not in ("auto", "cuda"):
        log.warning("device=%s is not used because auto_device=true", cfg.device)
    visible = visible_gpus(read_inventory(processes=False), environ)
    if visible.warning is not None:
        log.warning("%s", visible.warning)
    if not visible.gpus:
        return _cpu_or_nothing(cfg, _why_no_gpu(visible))
    request = GpuRequest(
        min_bytes=cfg.min_gpu_memory_mb * MIB,
        wait=cfg.wait_for_gpu,
        timeout_seconds=cfg.gpu_wait_timeout_minutes * 60,
        interval_seconds=cfg.gpu_check_interval_seconds,
        only=None if cfg.auto_device else _named(str(cfg.device), visible),
    )
    found = _wait(request, environ, sleep)
    if isinstance(found, NoGpu):
        return _cpu_or_nothing(cfg, found.reason)
    log.info("using GPU %d (%s, %s)", found.index, found.name, found.uuid)
    return found


def candidates(cfg: DictConfig, environ: Mapping[str, str]) -> tuple[GpuInfo, ...]:
    """The GPUs that could be taken right now, best first."""
    visible = visible_gpus(read_inventory(processes=False), environ)
    return tuple(rank(visible.gpus, cfg.min_gpu_memory_mb * MIB))


def free_bytes(gpu: Device) -> int | None:
    """What NVML says is free on the GPU now; None for the CPU or a GPU that does not answer."""
    if gpu is None:
        return None
    now = {g.uuid: g for g in read_inventory(processes=False).gpus}.get(gpu.uuid)
    return None if now is None else now.free_bytes


def settle(gpu: Device, free_before: int | None, *, sleep: Callable[[float], None]) -> int | None:
    """Wait until the memory of an attempt that ended is back, for some seconds at most.

    The driver may return it some hundred milliseconds after the process is gone.

    Args:
        gpu: where the attempt ran.
        free_before: bytes that were free there before it; None where not known.
        sleep: how to wait.

    Returns:
        Bytes that are free now, None where not known.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        now = free_bytes(gpu)
        if now is None or free_before is None or now >= free_before - _SETTLE_BAND_BYTES:
            return now
        if time.monotonic() >= deadline:
            return now
        sleep(0.05)


def wait_for_room(
    cfg: DictConfig,
    environ: Mapping[str, str],
    room: Room,
    *,
    sleep: Callable[[float], None],
) -> str | None:
    """Wait for free memory on one GPU, as long as the config allows.

    Returns:
        None when it is there, else why the waiting ended.
    """
    request = GpuRequest(
        min_bytes=room.free_bytes,
        timeout_seconds=cfg.gpu_wait_timeout_minutes * 60,
        interval_seconds=cfg.gpu_check_interval_seconds,
        only=room.gpu_uuid,
    )
    found = _wait(request, environ, sleep)
    return found.reason if isinstance(found, NoGpu) else None


def _wait(
    request: GpuRequest, environ: Mapping[str, str], sleep: Callable[[float], None]
) -> GpuInfo | NoGpu:
    with LiveLine() as line:
        return wait_for_gpu(
            request,
            read=lambda processes: visible_gpus(read_inventory(processes=processes), environ),
            announce=line.show,
            sleep=sleep,
        )


def name_for_trainer(gpu: Device, environ: Mapping[str, str], *, own_process: bool) -> str:
    """What ``cfg.device`` says to the trainer.

    Args:
        gpu: the attempt's GPU.
        environ: the launcher's environment.
        own_process: the trainer's process sees only this GPU, so that there it is the first.
    """
    if gpu is None:
        return "cpu"
    if own_process:
        return "cuda:0"
    visible = visible_gpus(read_inventory(processes=False), environ)
    return f"cuda:{visible.ordinal(gpu.uuid) or 0}"


def _named(device: str, visible: Visible) -> str | None:
    """The UUID of the GPU that ``device`` names among the visible ones, None for any."""
    if device == "auto":
        return None
    listed = ", ".join(f"cuda:{i} ({gpu.uuid})" for i, gpu in enumerate(visible.gpus))
    if device.startswith("cuda"):
        ordinal = int(device.partition(":")[2] or 0)
        if ordinal < len(visible.gpus):
            return visible.gpus[ordinal].uuid
    else:
        matches = [gpu.uuid for gpu in visible.gpus if gpu.uuid.startswith(device)]
        if len(matches) == 1:
            return matches[0]
    raise ConfigError(f"device={device}: no such GPU here; there are {listed}")


def _why_no_gpu(visible: Visible) -> str:
    if visible.hidden_on_purpose:
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return visible.problem or visible.warning or "no usable GPU"


def _cpu_or_nothing(cfg: DictConfig, reason: str) -> Device:
    if not cfg.allow_cpu_fallback:
        raise NoDevice(f"{reason}, and allow_cpu_fallback is false")
    log.info("%s: training on the CPU", reason)
    return None
