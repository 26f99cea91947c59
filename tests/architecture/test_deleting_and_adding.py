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

for name, least in ("few", 4), ("many", 3):
    cfg = {"isolation": "none", "device": "cpu", "lost_steps": least}
    try:
        launch(train, cfg, run_dir=f"{sys.argv[1]}/{name}")
    except ValueError:
        pass
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
    """With nothing but the files and the lines that the page shows, also on the page of keys."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    added = re.findall(r"^`features/(\w+)/(\w+\.py)` .*?```python\n(.*?)^```$", page, re.M | re.S)
    for name, file, code in added:
        path = copy / PACKAGE / "features" / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    for line, table in re.findall(r'`("features\.[^`]+",)`[^`]+`([A-Z]+)`', page):
        assembly = (copy / ASSEMBLY).read_text()
        begins = re.search(rf"^{table} = \w+\(\n(?: +\{{\n)?", assembly, re.M)
        assert begins, table
        before, after = assembly[: begins.end()], assembly[begins.end() :]
        (copy / ASSEMBLY).write_text(f"{before}    {line}\n{after}")
    script = tmp_path / "loses_steps.py"
    script.write_text(LOSES_STEPS)
    environ = {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, str(script), str(tmp_path)]
    subprocess.run(command, env=environ, cwd=tmp_path, check=True)
    advice = [
        json.loads((tmp_path / name / "summary.json").read_text())["advice"]
        for name in ("few", "many")
    ]
    assert advice == [[], ["3 steps were lost: save checkpoints more often"]]
    subprocess.run([sys.executable, "tests/support/keys.py"], env=environ, cwd=copy, check=True)
    assert "| `lost_steps` | `1` |" in (copy / "docs" / "configuration.md").read_text()
    assert "\nlost_steps: 1 #" in (copy / "configs" / "robust.yaml").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", features())
def test_the_project_works_without(name, tmp_path):
    without_feature.copy_without(name, tmp_path)
    without_feature.check(name, tmp_path, quick=False)
