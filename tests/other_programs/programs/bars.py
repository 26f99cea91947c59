"""A progress bar that rewrites its line, on stderr as tqdm does, and newest-first checkpoints."""

import argparse
import sys

from learning import STEPS, finish, save, trained

parser = argparse.ArgumentParser()
parser.add_argument("-b", type=int, default=16)
parser.add_argument("-a", type=int, default=1)
parser.add_argument("--resume")
options = parser.parse_args()
for step, weights in trained(options.resume, options.b, options.a):
    print(f"\r{100 * step // STEPS:3}%|{'#' * step:12}| {step}/{STEPS}", end="", file=sys.stderr)
    save(f"ckpt/{step:04}.json", step, weights)
print(file=sys.stderr)
finish(weights)
