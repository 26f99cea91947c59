"""In nanoGPT's manner: ``--key=value``, one checkpoint written over, ``--init_from=resume``."""

import sys

from learning import finish, save, trained

keys = {"init_from": "scratch", "batch_size": "16", "accumulation_steps": "1"}
for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    assert key in keys, f"unknown key {key}"
    keys[key] = value
size, accumulate = int(keys["batch_size"]), int(keys["accumulation_steps"])
resume = "out/ckpt.json" if keys["init_from"] == "resume" else None
for step, weights in trained(resume, size, accumulate):
    save("out/ckpt.json", step, weights)
finish(weights)
