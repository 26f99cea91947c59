"""This machine's own GPUs: hidden from all tests but those that ``pytest -m gpu`` runs.

The driver's libraries are hidden, and not the GPUs alone by CUDA_VISIBLE_DEVICES: tests set that
themselves, and NVML does not read it. So every machine is one without a driver, and a simulated
machine has nothing beside what is simulated.
"""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import pytest

_HIDING = Path(__file__).parent / "no_driver"
_LIBRARIES = ("libnvidia-ml.so.1", "libcuda.so.1")
_CHOSEN = "ROBUST_TRAIN_TEST_GPU"
"""UUID of the GPU that tests may use; empty if others compute on all."""

_MASK = "CUDA_VISIBLE_DEVICES"


def are_wanted(config: pytest.Config) -> bool:
    """Return whether ``-m`` selects tests that need a GPU, and surely no others."""
    selected = config.option.markexpr
    words = selected.split()
    return "gpu" in words and "or" not in words and "not gpu" not in selected


def prepare(config: pytest.Config) -> None:
    """Choose the idlest GPU for the tests that need one, or hide the driver from all tests."""
    if are_wanted(config):
        os.environ.setdefault(_CHOSEN, _idlest())
        os.environ[_MASK] = os.environ[_CHOSEN]
        return
    hide()
    # the loader has read the variable when this process began; those of xdist begin later
    if not config.getoption("numprocesses", None) and any(map(_is_there, _LIBRARIES)):
        config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def hide() -> None:
    """Hide the driver from all programs that this one starts."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if str(_HIDING) not in paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(_HIDING), *paths)))


def mask() -> dict[str, str]:
    """Return what shows a program the GPU that tests may use; empty where the driver is hidden."""
    return {_MASK: os.environ[_CHOSEN]} if _CHOSEN in os.environ else {}


def can_be_used() -> bool:
    """Return whether there is a GPU for the tests that need one."""
    if not os.environ.get(_CHOSEN):
        return False
    import torch

    return torch.cuda.is_available()


def _idlest() -> str:
    from robust_train.gpu.inventory import read_inventory
    from robust_train.gpu.select import idlest
    from robust_train.gpu.visible import visible_gpus

    gpu = idlest(visible_gpus(read_inventory(), os.environ).gpus)
    return "" if gpu is None else gpu.uuid


def _is_there(name: str) -> bool:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name) is not None
    return False
