"""Ctrl-C ends the training early: what there is so far is saved, and the exit code is 0."""

import argparse

from learning import STEPS, finish, happens, load, one_step, save

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
first, weights = load(parser.parse_args().resume)
step = first
try:
    for step in range(first + 1, STEPS + 1):
        happens(step)
        weights = one_step(weights, step, 16)
except KeyboardInterrupt:
    print("exiting from training early", flush=True)
    save("model.json", step - 1, weights)
else:
    finish(weights)
