"""What another project gets from ``pip install robust-train``."""

import json
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from world import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pytest.importorskip("hatchling", reason="the extra [test]")
    make = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    process = subprocess.run([*make, "-w", folder, ROOT], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_carries_configs_types_and_hydra_plugins(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"robust_train/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*.yaml")}
    assert configs <= names
    for folder in ("project_template", "report/templates"):
        files = (p for p in (ROOT / "src" / "robust_train" / folder).rglob("*") if p.is_file())
        ours = {str(p.relative_to(ROOT / "src")) for p in files if p.suffix != ".pyc"}
        assert ours, folder
        assert ours <= names, folder
    assert "robust_train/py.typed" in names
    assert "hydra_plugins/robust_train_searchpath/__init__.py" in names
    assert "hydra_plugins/robust_train_gpu_queue/__init__.py" in names
    licenses = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "LICENSE.uPlot.txt"}
    # a namespace that other plugins share: a file of ours there would hide theirs
    assert "hydra_plugins/__init__.py" not in names


RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)")


def test_no_link_of_the_package_page_is_relative(wheel):
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        page = files.read(metadata).decode()
    assert "## When something fails" in page
    assert not RELATIVE_LINK.search(page)


def test_the_package_page_links_to_its_version(monkeypatch):
    """The linked files are those of this version."""
    pytest.importorskip("hatchling", reason="the extra [test]")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from package_page import absolute

    page = "![a](docs/a.png) [b](c.md#d) [e](https://e.org) [f](#f)"
    assert absolute(page, "https://host/us", "v1") == (
        "![a](https://host/us/raw/v1/docs/a.png) [b](https://host/us/blob/v1/c.md#d) "
        "[e](https://e.org) [f](#f)"
    )
    assert absolute(page, "", "v1") == " b [e](https://e.org) [f](#f)"


WHERE = """
import robust_train
def is_it(cfg):
    return [cfg.data.test_every, cfg.max_retries, robust_train.__file__]
"""


def test_another_hydra_project_builds_on_robust(wheel, world):
    installed, project = world.folder / "installed", world.folder / "project"
    zipfile.ZipFile(wheel).extractall(installed)
    world.environ["PYTHONPATH"] = str(installed)
    shutil.copytree(ROOT / "examples" / "own_project", project)
    (project / "where.py").write_text(WHERE)
    run_dir = f"hydra.run.dir={world.run_dir}"
    words = ("main.py", "max_retries=7", "trainer._target_=where.is_it", run_dir)
    result = world.program(sys.executable, *words, cwd=project).summary["result"]
    assert result[:2] == [5, 7]
    assert result[2].startswith(str(installed))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_published_package_trains_after_installation(tmp_path, world):
    """In an empty folder, and passes its check. The wheel is made of the sdist, and installed
    beside this environment's dependencies.
    """
    for tool in ("build", "twine"):
        pytest.importorskip(tool, reason="the extra [test]")
    world.environ.pop("PYTHONPATH")

    def python(*words):
        world.program(sys.executable, "-m", *words)

    python("build", "-o", "dist", ROOT)
    wheel, sdist = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix != ".whl")
    python("twine", "check", "--strict", wheel, sdist)
    python("venv", "--without-pip", "fresh")
    (libraries,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    python("pip", "--python", "fresh/bin/python", "install", "--no-deps", wheel)
    (libraries / "dependencies.pth").write_text("\n".join(ours) + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    command = tmp_path / "fresh" / "bin" / "robust-train"
    code = "import robust_train; print(robust_train.__file__, robust_train.__version__)"
    shown = world.program(command.with_name("python"), "-c", code, cwd=empty).stdout
    where, version = shown.split()
    assert where.startswith(str(libraries))
    assert version in wheel.name
    world.program(command, "train", cwd=empty)
    (folder,) = empty.glob("outputs/*/*")
    assert json.loads((folder / "summary.json").read_text())["result"]["objective"] > 0.9
