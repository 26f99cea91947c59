"""A YAML file, ``key=value`` over it, and the newest checkpoint looked up by the program."""

import sys
from pathlib import Path

import yaml
from learning import finish, save, trained

config = yaml.safe_load(Path(sys.argv[1]).read_text())
for word in sys.argv[2:]:
    key, _, value = word.partition("=")
    config[key] = yaml.safe_load(value)
for step, weights in trained(config["resume"], config["batch"], config["accumulate"]):
    save(f"weights/epoch{step}.json", step, weights)
finish(weights)
