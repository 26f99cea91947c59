"""Two workers read the data; their number is in the source, and a dead one is an error."""

import argparse
import multiprocessing

from learning import STEPS, finish, gradient, happens, load, samples, save, stepped


def worker(tasks, batches):
    for step in iter(tasks.get, None):
        happens(step, events=("kill of a child",))
        batches.put((step, samples(step)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    first, weights = load(parser.parse_args().resume)
    context = multiprocessing.get_context("fork")
    tasks, batches = context.SimpleQueue(), context.Queue()
    workers = [context.Process(target=worker, args=(tasks, batches), daemon=True) for _ in range(2)]
    for process in workers:
        process.start()
    for step in range(first + 1, STEPS + 1):
        happens(step)
        tasks.put(step)
        while batches.empty():
            for process in workers:
                process.join(0.001)
                if process.exitcode is not None:
                    raise RuntimeError(
                        f"DataLoader worker (pid {process.pid}) is killed by signal: Killed. "
                    )
        weights = stepped(weights, gradient(weights, batches.get()[1]))
        save(f"checkpoints/{step}.json", step, weights)
    for _ in workers:
        tasks.put(None)
    finish(weights)
