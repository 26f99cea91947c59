"""In the manner of mp.spawn: a process for each rank, whose death is the parent's exception."""

import argparse
import multiprocessing

from learning import STEPS, finish, happens, load, one_step, save


class ProcessExitedException(Exception):
    pass


ProcessExitedException.__module__ = "torch.multiprocessing.spawn"


def rank(number, options):
    first, weights = load(options.resume)
    for step in range(first + 1, STEPS + 1):
        if number == 0:
            happens(step, events=("kill of a child",))
        weights = one_step(weights, step, 16)
        if number == 0:
            save(f"checkpoints/{step}.json", step, weights)
    if number == 0:
        finish(weights)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(number, options)) for number in range(2)]
    for process in ranks:
        process.start()
    happens(7, events=("kill", "bug", "hang", "wait"))
    for number, process in enumerate(ranks):
        process.join()
        if process.exitcode == -9:
            raise ProcessExitedException(f"process {number} terminated with signal SIGKILL")
