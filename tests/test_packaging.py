"""What another project gets from ``pip install robust-train``."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from world import ROOT, World

PROJECT_CONFIG = """
defaults:
  - robust
  - _self_

experiment: mine
min_batch_size: 2
training:
  batch_size: 8
trainer:
  _target_: my_training.train
"""

PROJECT_MAIN = """
import hydra
from robust_train import launch

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    return launch(None, cfg).result

if __name__ == "__main__":
    main()
"""

PROJECT_TRAINER = """
import robust_train

def train(cfg):
    return [cfg.experiment, cfg.training.batch_size, cfg.max_retries, robust_train.__file__]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    process = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution found for setuptools" in process.stderr:
        pytest.skip("the build backend cannot be fetched: no network")
    assert process.returncode == 0, process.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_carries_configs_types_and_hydra_plugins(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"robust_train/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*.yaml")}
    assert configs <= names
    assert "robust_train/py.typed" in names
    templates = (ROOT / "src" / "robust_train" / "report" / "templates").iterdir()
    assert {f"robust_train/report/templates/{path.name}" for path in templates} <= names
    assert "hydra_plugins/robust_train_searchpath/__init__.py" in names
    assert "hydra_plugins/robust_train_gpu_queue/__init__.py" in names
    # a namespace that other plugins share: a file of ours there would hide theirs
    assert "hydra_plugins/__init__.py" not in names


def test_another_hydra_project_builds_on_robust(wheel: Path, world: World):
    installed = world.folder / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    project = world.folder / "project"
    (project / "conf").mkdir(parents=True)
    (project / "conf" / "config.yaml").write_text(PROJECT_CONFIG)
    (project / "main.py").write_text(PROJECT_MAIN)
    (project / "my_training.py").write_text(PROJECT_TRAINER)
    process = subprocess.run(
        [sys.executable, "main.py", "max_retries=7", f"hydra.run.dir={world.run_dir}"],
        cwd=project,
        env={**world.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    from world import Ended

    result = Ended(0, "", "", world.run_dir).summary["result"]
    assert result[:3] == ["mine", 8, 7]
    assert result[3].startswith(str(installed))
