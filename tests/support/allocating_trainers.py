"""Trainers that say which settings torch's allocator has; torch is among their libraries."""

import os
from pathlib import Path

import torch

import failing_trainers


def fails_by_script(cfg, run):
    """As :func:`failing_trainers.fails_by_script`."""
    with Path(os.environ["ALLOCATOR_FILE"]).open("a") as file:
        file.write(f"{torch._C._accelerator_getAllocatorSettings()}\n")
    return failing_trainers.fails_by_script(cfg, run)
