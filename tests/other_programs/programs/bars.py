"""A progress bar that rewrites its line, on stderr as tqdm does, and newest-first checkpoints."""

import argparse
import sys

from learning import STEPS, finish, happens, load, one_step, save

parser = argparse.ArgumentParser()
parser.add_argument("-b", type=int, default=16)
parser.add_argument("-a", type=int, default=1)
parser.add_argument("--resume")
options = parser.parse_args()
first, weights = load(options.resume)
for step in range(first + 1, STEPS + 1):
    print(f"\r{100 * step // STEPS:3}%|{'#' * step:12}| {step}/{STEPS}", end="", file=sys.stderr)
    happens(step, options.b)
    weights = one_step(weights, step, options.b, options.a)
    save(f"ckpt/{step:04}.json", step, weights)
print(file=sys.stderr)
finish(weights)
