"""A feature is a folder and its lines in ``assembly.py``: it can be deleted, and added."""

import json
import os
import re
import subprocess
import sys

import pytest
import without_feature
from without_feature import PACKAGE, ROOT, features

A_FEATURE = "slow"
ASSEMBLY = str(PACKAGE / "assembly.py")

LOSES_STEPS = """
import sys
from robust_train import launch

def train(cfg, run):
    run.progress(3)
    raise ValueError("a bug")

launch(train, {"isolation": "none", "device": "cpu"}, run_dir=sys.argv[1])
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project without a feature, as the command makes it."""
    folder = tmp_path_factory.mktemp("copy")
    command = [sys.executable, without_feature.__file__, A_FEATURE, "--to", str(folder)]
    subprocess.run(command, check=True)
    return folder


def files_in(folder):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path for path in paths}


def test_a_copy_lacks_nothing_but_the_feature(copy, tmp_path):
    without_feature.copy_project(tmp_path)
    whole, copied = files_in(tmp_path), files_in(copy)
    deleted = (f"{PACKAGE}/features/{A_FEATURE}/", f"tests/features/{A_FEATURE}/")
    assert whole.keys() - copied.keys() == {path for path in whole if path.startswith(deleted)}
    assert copied.keys() <= whole.keys()
    changed = {path for path in copied if copied[path].read_bytes() != whole[path].read_bytes()}
    assert changed == {ASSEMBLY}
    kept = copied[ASSEMBLY].read_text().splitlines()
    lines = whole[ASSEMBLY].read_text().splitlines()
    assert [line for line in lines if line not in kept] == [f'    "features.{A_FEATURE}",']


def test_the_feature_of_the_documentation_reaches_the_summary(copy, tmp_path):
    """With nothing but the files and the line that the page shows."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    added = re.findall(r"^`features/(\w+)/(\w+\.py)` .*?```python\n(.*?)^```$", page, re.M | re.S)
    for name, file, code in added:
        path = copy / PACKAGE / "features" / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    (line,) = re.findall(r'`("features\.\w+",)`', page)
    assembly = (copy / ASSEMBLY).read_text()
    (copy / ASSEMBLY).write_text(assembly.replace("_load(\n    ", f"_load(\n    {line}\n    ", 1))
    script = tmp_path / "loses_steps.py"
    script.write_text(LOSES_STEPS)
    environ = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, str(script), str(tmp_path / "run")]
    subprocess.run(command, env=environ, cwd=tmp_path, check=False)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["advice"] == ["3 steps were lost: save checkpoints more often"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", features())
def test_the_project_works_without(name, tmp_path):
    without_feature.copy_without(name, tmp_path)
    without_feature.check(name, tmp_path, quick=False)
