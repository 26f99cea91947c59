"""Train: python main.py training.batch_size=32"""

from omegaconf import DictConfig

from robust_train import hydra_main, launch


@hydra_main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> object:
    """Run a job: choose a device, call ``trainer._target_``, recover when memory runs out."""
    return launch(None, cfg).objective


if __name__ == "__main__":
    main()
