"""Train robustly: python train_robust.py model=lora dataset=flowers102

Configuration: configs/robust.yaml. Without arguments it trains a small network on digits.
"""

try:
    from robust_train.cli.train import open_robust
except ModuleNotFoundError as error:
    if error.name != "robust_train":
        raise
    raise SystemExit("robust_train is not installed here; first: . .venv/bin/activate") from None

if __name__ == "__main__":
    open_robust()
