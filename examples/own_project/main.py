"""Train on iris: python main.py model=linear training.lr=0.05"""

from robust_train import hydra_main, launch


@hydra_main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    return launch(None, cfg).objective


if __name__ == "__main__":
    main()
