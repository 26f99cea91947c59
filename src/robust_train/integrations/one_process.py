"""These integrations train in one process."""

from __future__ import annotations

from robust_train.errors import UserError
from robust_train.run import Run


def refuse_ranks(run: Run, framework: str) -> None:
    """Say so where there are several, each of which would train by itself.

    Raises:
        UserError: there are.
    """
    if run.world_size > 1:
        raise UserError(
            f"num_gpus={run.world_size}: {framework} trains on one GPU under the launcher; use "
            "num_gpus=1, or a loop of your own with run.micro_batches and DistributedDataParallel"
        )
