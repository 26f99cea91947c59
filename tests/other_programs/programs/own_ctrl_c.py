"""Ctrl-C ends the training early: what there is so far is saved, and the exit code is 0."""

import argparse

from learning import finish, save, trained

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
resume = parser.parse_args().resume
try:
    for step, weights in trained(resume):  # noqa: B007
        pass
except KeyboardInterrupt:
    print("exiting from training early", flush=True)
    save("model.json", step, weights)
else:
    finish(weights)
