"""Train plainly: python train.py training.batch_size=32 device=cuda:1

The same trainer as train_robust.py, one run in this process, without supervision.
Configuration: configs/config.yaml.
"""

from robust_train.cli.door import open_plain

if __name__ == "__main__":
    open_plain()
