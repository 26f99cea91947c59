"""A Hydra project of its own: the keys are its own, and robust-train's are in the group robust."""

from golden_trainers import fit

import robust_train


@robust_train.hydra_main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg, run):
    """Fit as the other golden runs do."""
    return fit(cfg.data.batch_size, cfg.optim.lr, run)


if __name__ == "__main__":
    main()
