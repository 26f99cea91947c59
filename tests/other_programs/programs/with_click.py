"""Options by click, a dated folder of its own for each start."""

import datetime
from pathlib import Path

import click
from learning import STEPS, finish, happens, load, one_step, save


@click.command()
@click.option("--batch-size", type=click.IntRange(min=1), default=16)
@click.option("--grad-accum", type=int, default=1)
@click.option("--resume", type=click.Path(exists=True))
def main(batch_size, grad_accum, resume):
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    first, weights = load(resume)
    for step in range(first + 1, STEPS + 1):
        happens(step, batch_size)
        weights = one_step(weights, step, batch_size, grad_accum)
        save(Path("runs", now, "checkpoints", "last.json"), step, weights)
    finish(weights)


if __name__ == "__main__":
    main()
