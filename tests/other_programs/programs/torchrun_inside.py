"""Two ranks under torchrun, each of which holds half of a step."""

import argparse
import os

import torch
import torch.distributed
from learning import STEPS, finish, gradient, happens, load, samples, save, stepped

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
first, weights = load(parser.parse_args().resume)
torch.distributed.init_process_group("gloo")
rank = int(os.environ["RANK"])
for step in range(first + 1, STEPS + 1):
    if rank == 1:
        happens(step, events=("kill of a child",))
    if rank == 0:
        happens(step, events=("bug", "wait"))
    summed = torch.tensor(gradient(weights, samples(step)[rank::2]), dtype=torch.float64)
    torch.distributed.all_reduce(summed)
    weights = stepped(weights, (summed / 2).tolist())
    if rank == 0:
        save(f"checkpoints/{step}.json", step, weights)
torch.distributed.destroy_process_group()
if rank == 0:
    finish(weights)
