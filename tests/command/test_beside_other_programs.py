"""Hydra programs in whose environment robust-train is, and has not been asked for."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from world import ROOT

PROGRAMS = """
import os, sys, warnings
from dataclasses import dataclass, field
if os.environ.get("WITHOUT"):
    import hydra_plugins
    hydra_plugins.__path__ = [
        folder for folder in hydra_plugins.__path__
        if not os.path.isdir(f"{folder}/robust_train_searchpath")
    ]
warnings.simplefilter("always")
import hydra
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, OmegaConf

@dataclass
class Net:
    width: int = 3

@dataclass
class Config:
    seed: int = 1
    model: Net = field(default_factory=Net)
    trainer: str = "mine"

store = ConfigStore.instance()
store.store(name="config", node=Config)
store.store(name="plain", node={"width": 4, "dataset": 3})
store.store(name="groups", node={"defaults": [{"model": "cnn"}, {"trainer": "none"}, "_self_"]})
store.store(group="model", name="cnn", node={"name": "my own cnn", "lr": 0.5})
store.store(group="trainer", name="none", node=Net)

def main(cfg):
    print(OmegaConf.to_yaml(cfg), HydraConfig.get().runtime.config_sources)

def run(path, name, *words):
    print("##", path, name, *words, flush=True)
    sys.argv[1:] = words
    try:
        hydra.main(version_base="1.3", config_path=path, config_name=name)(main)()
    except SystemExit as end:
        print("code", end.code)
    sys.stdout.flush()

run(None, None)
run("conf", "main")
run("conf", "main", "model=other")
run("conf", "main", "model=otehr")
run("conf", "main", "--multirun", "model=glob(*)")
run("conf", "main", "--info", "searchpath")
run("conf", "main", "--info", "defaults")
run("conf", "main", "+dataset=digits")
run("conf", "misspelt")
run("conf", "lora")
for name in ("config", "plain", "groups"):
    run(None, name)
run(None, "groups", "--multirun", "model=glob(*)", "trainer=glob(*)")
run(None, "groups", "model=lora")
run(None, "groups", "--help")
for line in ("", "model=", "data", "rob", "schema/"):
    os.environ |= {"COMP_LINE": f"python main.py {line}", "COMP_POINT": "80", "COMP_CWORD": "2"}
    run("conf", "main", "--shell-completion", "query=bash")
with initialize(version_base="1.3", config_path="conf"):
    print(OmegaConf.to_yaml(compose("main", return_hydra_config=True).hydra.runtime))
assert not [name for name in sys.modules if name.partition(".")[0] == "robust_train"]

# a program that asks
with initialize(version_base="1.3", config_path="conf"):
    asks = compose("asks")
    print("asks:", asks.model, asks.training.batch_size, asks.num_gpus, sorted(asks)[-2:])
    options = GlobalHydra.instance().config_loader().get_group_options
    print("options:", options("model", config_name="asks"))
run("conf", "asks", "--info", "defaults-tree")
"""
TIME = re.compile(r"\d{4}-\d\d-\d\d[ _/]\d\d[:-]\d\d[:-]\d\d(,\d+)?")


@pytest.fixture
def project(tmp_path):
    files = {
        "main.py": PROGRAMS,
        "conf/main.yaml": "defaults: [model: mine, _self_]\nlr: 1\n",
        "conf/asks.yaml": """
            defaults: [robust, {model: mine}, _self_]
            hydra: {searchpath: [pkg://robust_train.configs]}
        """,
        "conf/lora.yaml": "defaults: [model: lora]\n",
        "conf/model/mine.yaml": "width: 1\n",
        "conf/model/other.yaml": "depth: 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def outcomes_of(project, *environs):
    """What the programs print in each of these environments, without the times in it."""
    started = [
        subprocess.Popen(
            [sys.executable, "main.py"],
            cwd=project,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environ in environs
    ]
    for program in started:
        printed, errors = program.communicate(timeout=120)
        assert program.returncode == 0, errors
        yield [TIME.sub("", text).splitlines() for text in (printed, errors)]


def test_they_compose_what_they_do_without_it(project):
    """Config, search path, groups, globs, completion, what an error lists, and no warning."""
    beside, alone = outcomes_of(project, {}, {"WITHOUT": "1"})
    assert beside == alone
    printed, errors = alone
    assert printed.count("  name: my own cnn") > 1
    assert "Could not find 'model/lora'" in "".join(errors)
    assert "asks: {'width': 1} 64 1 ['training', 'wait_for_gpu']" in printed
    assert "options: ['cnn', 'mine', 'other']" in printed
