"""Train plainly: python train.py training.batch_size=32 device=cuda:1

The same job as train_robust.py, in one attempt in this process, without remedies.
Configuration: configs/config.yaml.
"""

try:
    from robust_train.cli.train import open_plain
except ModuleNotFoundError as error:
    if error.name != "robust_train":
        raise
    raise SystemExit("robust_train is not installed here; first: . .venv/bin/activate") from None

if __name__ == "__main__":
    open_plain()
