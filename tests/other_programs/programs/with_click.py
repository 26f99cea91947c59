"""Options by click, a dated folder of its own for each start."""

import datetime
from pathlib import Path

import click
from learning import finish, save, trained


@click.command()
@click.option("--batch-size", type=click.IntRange(min=1), default=16)
@click.option("--grad-accum", type=int, default=1)
@click.option("--resume", type=click.Path(exists=True))
def main(batch_size, grad_accum, resume):
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")
    for step, weights in trained(resume, batch_size, grad_accum):
        save(Path("runs", now, "checkpoints", "last.json"), step, weights)
    finish(weights)


if __name__ == "__main__":
    main()
