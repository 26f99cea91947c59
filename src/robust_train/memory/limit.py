"""A limit to what one process may take of a GPU."""

from __future__ import annotations

import logging
import sys

from robust_train.config.schema import MemoryConfig

log = logging.getLogger("robust_train")


def limit_memory(fraction: float, index: int | None) -> bool:
    """Let this process's caching allocator hold at most this share of a GPU's memory.

    Takes effect when torch starts CUDA, and does not start it. Where that is not possible, a line
    in the log says so.

    Args:
        fraction: of the GPU's total memory, above 0 to 1; 1 is no limit.
        index: of the GPU, as this process counts; None for the CPU.

    Returns:
        Whether all is done; False where torch is not imported yet.
    """
    if index is None:
        if fraction != MemoryConfig.fraction:
            log.info("memory.fraction=%g: has no effect on the CPU", fraction)
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False

    def limit() -> None:
        try:
            torch.cuda.set_per_process_memory_fraction(float(fraction), index)
        except (RuntimeError, ValueError) as error:
            log.warning("memory.fraction=%g: %s", fraction, str(error).splitlines()[0])

    torch.cuda._lazy_call(limit)
    return True
