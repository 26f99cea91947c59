"""A YAML file, ``key=value`` over it, and the newest checkpoint looked up by the program."""

import sys
from pathlib import Path

import yaml
from learning import STEPS, finish, happens, load, one_step, save

config = yaml.safe_load(Path(sys.argv[1]).read_text())
for word in sys.argv[2:]:
    key, _, value = word.partition("=")
    config[key] = yaml.safe_load(value)
first, weights = load(config["resume"])
for step in range(first + 1, STEPS + 1):
    happens(step, config["batch"])
    weights = one_step(weights, step, config["batch"], config["accumulate"])
    save(f"weights/epoch{step}.json", step, weights)
finish(weights)
