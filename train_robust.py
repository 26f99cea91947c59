"""Train robustly: python train_robust.py model=lora dataset=flowers102

Configuration: configs/robust.yaml. Without arguments it trains a small network on digits.
"""

from robust_train.cli.door import open_robust

if __name__ == "__main__":
    open_robust()
