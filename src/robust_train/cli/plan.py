"""``robust-train plan [OVERRIDE …]``: how much memory a job will take, and where it fits."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from robust_train.cli.output import Parser, print_json, print_table
from robust_train.errors import EXIT_BAD_CONFIG
from robust_train.gpu.nvml_session import NO_DRIVER
from robust_train.gpu.visible import VARIABLE
from robust_train.values import GIB, MIB

if TYPE_CHECKING:
    from robust_train.planning.memory_plan import GpuFit, MemoryPlan, PlannedSize

_ABOUT = "predicting memory, training nothing"
_EPILOG = """
exit codes: 0 planned, 2 cannot be planned as asked

examples:
  robust-train plan model=lora dataset=flowers102
  robust-train plan model=full_finetune training.mixed_precision=false --batch-sizes 8,16,32
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return the exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    from rich.console import Console

    from robust_train.config.refusals import REFUSALS, explain

    with Console(stderr=True).status(f"{_ABOUT}: importing torch") as status:
        try:
            plan = _plan(arguments, lambda size: status.update(f"{_ABOUT}: micro-batch {size}"))
        except REFUSALS as error:
            print(explain(error, "robust", arguments.overrides), file=sys.stderr)
            return EXIT_BAD_CONFIG
    if arguments.json:
        print_json(plan.as_json())
    else:
        _show(plan)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="robust-train plan",
        usage="robust-train plan [OVERRIDE …] [OPTIONS]",
        description="How much GPU memory a job of the built-in trainer will take for each "
        "micro-batch, predicted without a GPU, and where it fits now.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="as for train_robust.py: model=lora")
    sizes = "micro-batches to predict (training.batch_size, twice that, and halves)"
    add("--batch-sizes", type=_sizes, metavar="N,N…", help=sizes)
    parser.add_json()
    return parser


def _sizes(text: str) -> list[int]:
    if not re.fullmatch(r"0*[1-9]\d{0,5}(,0*[1-9]\d{0,5})*", text):
        raise argparse.ArgumentTypeError(f"{text}: accepted are integers of 1 or more, 8,16")
    return [int(part) for part in text.split(",")]


def _plan(arguments: argparse.Namespace, on_size: Callable[[int], None]) -> MemoryPlan:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from robust_train.config.refusals import composed
    from robust_train.errors import ConfigError
    from robust_train.planning.memory_plan import plan_memory

    for override in OverridesParser.create().parse_overrides(list(arguments.overrides)):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: one value at a time; --batch-sizes 8,16 is for several "
                "micro-batches"
            )
    cfg, environ = composed(arguments.overrides), dict(os.environ)
    log = logging.getLogger("robust_train")
    level = log.level
    log.setLevel(logging.WARNING)  # what the model's builder logs is not for here
    os.environ[VARIABLE] = ""  # torch must not start CUDA here
    try:
        sizes = arguments.batch_sizes
        return plan_memory(cfg, batch_sizes=sizes, environ=environ, on_size=on_size)
    finally:
        log.setLevel(level)
        os.environ.pop(VARIABLE)
        os.environ.update(environ)


def _show(plan: MemoryPlan) -> None:
    # both halves are two bytes
    note = " (float16 takes the same)" if plan.precision == "bfloat16" else ""
    print(f"{plan.model} on {plan.dataset}, {plan.precision}{note}; sizes in MiB")
    rows = [_row(row) for row in plan.rows]
    shown = [name for name in rows[0] if name != "fits now on GPU" or plan.gpus]
    right = set(shown) - {"accumulates", "fits now on GPU"}
    print_table(shown, [[row[name] for name in shown] for row in rows], right)
    print(
        "allocated: tensors and cuBLAS (64 MiB); on the GPU: a tenth more for the allocator's "
        "cache, and a CUDA context (512 MiB)\n"
    )
    if plan.gpus:
        columns = ("GPU", "name", "usable", "total", "largest batch now", "if it were empty")
        print_table((*columns, "note"), [_gpu(fit) for fit in plan.gpus], {*columns} - {"name"})
    else:
        why = "no GPU here" if plan.problem == NO_DRIVER else plan.problem
        print(f"{why}: the largest batch on one that is empty:")
        sizes = [f"{size // GIB} GB" for size in plan.sizes]
        print_table(sizes, [[_largest(batch) for batch in plan.sizes.values()]], sizes)
    print(f"planned in {plan.seconds:.1f} s")


def _row(row: PlannedSize) -> dict[str, str]:
    return {
        "batch": str(row.batch_size),
        "accumulates": "yes" if row.accumulates else "no",
        "tensors": f"{row.tensors_bytes / MIB:.0f}",
        "allocated": f"{row.allocated_bytes / MIB:.0f}",
        "on the GPU": f"{row.gpu_bytes / MIB:.0f}",
        "fits now on GPU": ", ".join(map(str, row.fits_on)) or "none",
    }


def _gpu(fit: GpuFit) -> list[str]:
    sizes = (str(size // MIB) for size in (fit.usable_bytes, fit.total_bytes))
    largest = map(_largest, (fit.largest_batch_now, fit.largest_batch_empty))
    return [str(fit.index), fit.name, *sizes, *largest, fit.why_not or "-"]


def _largest(batch: int | None) -> str:
    return "none" if batch is None else str(batch)
