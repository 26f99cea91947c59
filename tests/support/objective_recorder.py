"""A Hydra callback that writes down what each job returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class ObjectiveRecorder(Callback):
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        with Path("objectives").open("a") as file:
            file.write(f"{job_return.return_value}\n")
