"""As most examples are: a batch size, a learning rate, no accumulation, no checkpoint."""

import argparse

from learning import STEPS, finish, gradient, happens, samples, stepped

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()
weights = [0.0, 0.0]
for step in range(1, STEPS + 1):
    happens(step, options.batch_size)
    part = samples(step, options.batch_size)
    weights = stepped(weights, gradient(weights, part), options.lr)
finish(weights)
