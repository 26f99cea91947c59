"""A rank that torchrun starts: python -m torch.distributed.run … golden_guest.py RUN_DIR"""

import sys

from golden_trainers import train

from robust_train import launch

if __name__ == "__main__":
    config = {"auto_device": False, "device": "cpu", "training": {"batch_size": 32, "lr": 0.01}}
    launch(train, config, run_dir=sys.argv[1])
