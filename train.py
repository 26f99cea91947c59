"""Train plainly: python train.py training.batch_size=32 device=cuda:1

The same job as train_robust.py, in one attempt in this process, without remedies.
Configuration: configs/config.yaml.
"""

from robust_train.cli.door import open_plain

if __name__ == "__main__":
    open_plain()
