"""Reserves the GPU of one rank of torchrun, srun, PyTorchJob or Ray Train.

:class:`.guest.RankDriver` uses it in the rank's process. The local rank that the engine
assigned is the number of the rank's GPU.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from robust_train.compat import when_cuda_starts
from robust_train.config.schema import RobustConfig
from robust_train.host.engine import GuestRank
from robust_train.model.errors import ConfigError, NoDeviceError
from robust_train.model.gpu import Group
from robust_train.queue.devices import Devices

log = logging.getLogger("robust_train")


class RankDevices(Devices):
    """Reserves the GPU of one rank, whose number is the local rank, in the host's queue."""

    def __init__(
        self, guest: GuestRank, config: RobustConfig, job_name: str, run_dir: Path
    ) -> None:
        super().__init__(replace(config, num_gpus=1), job_name, os.environ, run_dir, time.sleep)
        self._guest = guest

    def acquire(self, fewer: Sequence[int] = ()) -> Group:
        """Reserve the rank's GPU and return it, or return no GPU if the rank trains on the CPU.

        Without a queue the rank uses the GPU without a reservation, after a warning.
        """
        group = self._find_gpu()
        device = group[0].uuid if group else "cpu"
        self._config = replace(
            self._config,
            device=device,
            auto_device=False,
            wait_for_gpu=False,
            allow_cpu_fallback=False,
        )
        try:
            super().acquire()
        except (ConfigError, NoDeviceError) as error:
            log.warning("%s is used without a reservation: %s", self._config.device, error)
        return group

    def _find_gpu(self) -> Group:
        """Return the rank's GPU, or no GPU if the rank trains on the CPU."""
        if not self._config.picks_gpu and self._config.device == "cpu":
            return ()
        visible = self._read(False)
        if not visible.gpus:
            return self._without_gpus(visible)
        import torch

        number = self._guest.local_rank % len(visible.gpus)
        # A trainer that names the device just "cuda" gets this GPU.
        when_cuda_starts(torch, lambda: torch.cuda.set_device(number))
        return (visible.gpus[number],)
