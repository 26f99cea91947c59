"""Projects outside our tree: a new project of ``robust-train init``, and the example."""

import json
import runpy
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

import warm
from attempts import keys_at_the_root
from robust_train import launch
from robust_train.attempt.run import Run, live_of
from world import ROOT


def _run(world, folder, *words, code=0):
    """Run a project's ``main.py`` in its folder."""
    world.environ["PYTHONPATH"] = str(ROOT / "src")
    return world.end(warm.start([f"{folder}/main.py", *words], folder, world.environ), code)


def _summaries(folder):
    return [json.loads(path.read_text()) for path in folder.glob("outputs/*/*/summary.json")]


@pytest.fixture
def just():
    program = shutil.which("just", path=str(Path(sys.executable).parent))
    return program or pytest.skip("just is not installed (pip install rust-just)")


@pytest.fixture
def project(world):
    """What ``robust-train init`` writes."""
    world.robust_train("init", "deep/mine", code=0)
    return world.folder / "deep" / "mine"


def test_a_resuming_new_project_draws_the_same(tmp_path):
    """What it would have drawn without the interruption."""
    path = ROOT / "src" / "robust_train" / "project_template" / "training.py"
    code = runpy.run_path(str(path))
    spirals = {"samples": 40, "width": 4}
    training = {"batch_size": 8, "gradient_accumulation_steps": 1, "lr": 0.01}

    def batches_of(folder, steps, resume=None):
        seen = []

        class Watched(Run):
            def backward(self, loss_of, batch, model=None, **options):
                seen.append(batch[0].tolist())

        keys = {"device": "cpu", "seed": 3, "training": training}
        cfg = OmegaConf.create({**keys, "spirals": {**spirals, "steps": steps}})
        (tmp_path / folder).mkdir()
        run = Watched(run_dir=tmp_path / folder, resume_checkpoint=resume)
        code["train"](cfg, run)
        live_of(run).saves.finish()  # as the attempt does
        return seen

    whole = batches_of("whole", 4)
    first = batches_of("first", 2)
    rest = batches_of("rest", 4, tmp_path / "first" / "checkpoints" / "step-00000002.pt")
    assert first + rest == whole


def test_a_new_project_trains_and_resumes(world, project, just):
    """At once; its recipe resumes from its checkpoint."""
    _run(world, project)
    (folder,) = project.glob("outputs/*/*")
    assert "_spirals_" in folder.name
    (summary,) = _summaries(project)
    assert summary["status"] == "completed"
    assert summary["result"] > 0.95
    (attempt,) = summary["attempts"]
    steps = attempt["end_step"]
    assert summary["checkpoint"].endswith(f"step-{steps:08}.pt")
    # as if it had been killed after the checkpoint
    identity = folder / "job.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"completed": None}))
    more = (f"spirals.steps={steps + 20}", f"hydra.run.dir={folder}")
    assert world.program(just, "--evaluate", "python", cwd=project).stdout == "python"
    recipe = world.program(just, "python=echo", "train", *more, cwd=project)
    assert recipe.stdout.split() == ["main.py", *more]
    _run(world, project, *more)
    (attempt,) = _summaries(project)[0]["attempts"]
    assert (attempt["start_step"], attempt["end_step"]) == (steps, steps + 20)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "src" / "robust_train" / "project_template"])
def test_recipes_keep_quotes_and_spaces(world, folder, just):
    words = ["training.lr=tag(log,interval(1e-5,1e-2))", "job_name='two  words'"]
    echoed = "python=python3 -c 'import sys; print(sys.argv[1:])'"
    recipe = (just, "--justfile", folder / "justfile", echoed, "sweep", *words)
    ended = world.program(*recipe)
    assert ended.stdout.rstrip().endswith(f"{words}"[1:])


def test_nothing_is_overwritten(world, project):
    (project / "main.py").write_text("mine")
    shutil.rmtree(project / "conf")
    again = world.robust_train("init", "deep/mine", code=2)
    assert len(again.stderr.strip().splitlines()) == 1
    assert "exists already" in again.stderr
    assert (project / "main.py").read_text() == "mine"
    shutil.rmtree(project)
    project.mkdir()
    (project / "conf").touch()
    again = world.robust_train("init", "deep/mine", code=2)
    assert again.stderr == "robust-train init: deep/mine/conf: File exists\n"


@pytest.fixture
def own_project(tmp_path):
    """A copy of ``examples/own_project``, outside of our tree."""
    left_out = shutil.ignore_patterns("outputs", "multirun", "__pycache__")
    example = ROOT / "examples" / "own_project"
    return shutil.copytree(example, tmp_path / "elsewhere", ignore=left_out)


def test_your_own_hydra_project_builds_on_robust(world, own_project):
    ranks = ("num_gpus=2", "auto_device=false", "device=cpu")
    _run(world, own_project, "training.batch_size=30", *ranks)
    (summary,) = _summaries(own_project)
    assert summary["result"]["objective"] > 0.9
    (attempt,) = summary["attempts"]
    assert (attempt["ranks"], attempt["effective_batch_size"]) == (2, 60)
    (folder,) = own_project.glob("outputs/*/*")
    assert "_iris_small_" in folder.name


def test_mistakes_in_a_project_take_one_line(world, own_project):
    """The exit code is 2."""
    config = own_project / "conf"
    (config / "net").mkdir()
    for name, text in (("tab", "a:\n\tb: 1\n"), ("twice", "a: 1\na: 2\n"), ("open", "a: {b\n")):
        (config / "net" / f"{name}.yaml").write_text(text)
    for word, words in (
        ("iris.x=1", "a key of your own takes a plus: +iris.x=1"),
        ("num_gpus=0", "must be 1 or more"),
        ("+net=tab", "net/tab.yaml, line 2, column 1: not YAML: found character"),
        ("+net=twice", "net/twice.yaml, line 2, column 1: not YAML: found duplicate key a"),
        ("+net=open", "net/open.yaml, line 2, column 1: not YAML: expected ',' or '}'"),
    ):
        ended = _run(world, own_project, word, code=2)
        (line,) = ended.stderr.splitlines()
        assert words in line


@pytest.fixture
def foreign(world):
    """A Hydra project that uses robust-train only in the decorator of its ``main``."""
    folder = world.folder / "foreign"
    files = {
        "main.py": """
            import functools
            import robust_train

            def task_wrapper(task):
                @functools.wraps(task)
                def wrapped(cfg):
                    return task(cfg=cfg)
                return wrapped

            @task_wrapper
            def train(cfg):
                if cfg.fits == 0:
                    raise robust_train.UserError("fits=0: nothing does")
                if cfg.data.batch_size > cfg.fits:
                    size = cfg.data.batch_size
                    raise RuntimeError(f"CUDA out of memory. Tried to allocate {size}.00 MiB")
                return {"val/acc": Figure(cfg.data.batch_size), "batch": cfg.data.batch_size}

            class Figure:  # as numpy's and torch's
                ndim = 0
                def __init__(self, value): self.value = value
                def item(self): return self.value

            @robust_train.hydra_main(
                version_base="1.3", config_path="configs", config_name="train.yaml"
            )
            def main(cfg):
                assert "robust" not in cfg
                return train(cfg)

            if __name__ == "__main__":
                main()
        """,
        "configs/train.yaml": """
            defaults: [_self_, {data: mine}, {model: mine}, {trainer: mine}, {hydra: mine}]
            task_name: train
            seed: null
            fits: 100
            optimized_metric: val/acc
            never_read: ???
        """,
        "configs/data/mine.yaml": "{batch_size: 32, num_workers: 0}",
        "configs/model/mine.yaml": "{name: [1], lr: fast}",
        "configs/trainer/mine.yaml": "{accumulate_grad_batches: 1, devices: 1}",
        "configs/hydra/mine.yaml": """
            run: {dir: "out/${task_name}"}
            sweep: {dir: "out/sweep"}
            job_logging:
              handlers: {file: {filename: "${hydra.runtime.output_dir}/${task_name}.log"}}
        """,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def test_a_hydra_project_needs_one_edit(world, foreign):
    """Its groups and its batch size stay its own; ours are in ``robust``."""
    _run(world, foreign, "fits=10", "robust.num_gpus=1")
    folder = foreign / "out" / "train"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["result"] == {"val/acc": 8, "batch": 8, "objective": 8}
    sizes = [
        (attempt["batch_size"], attempt["effective_batch_size"]) for attempt in summary["attempts"]
    ]
    assert sizes == [(32, 32), (16, 32), (8, 32)]
    log = (folder / "train.log").read_text()
    assert "attempt 1" in log


def test_important_lines_survive_a_projects_logging(world, foreign):
    """The project's logging disables every logger that exists, which is Python's default."""
    (foreign / "configs/trainer/bare.yaml").write_text("{devices: 1}")
    muted = "hydra.job_logging.disable_existing_loggers=true"
    ended = _run(world, foreign, "fits=20", "trainer=bare", muted)
    for line in (
        "warning: attempt 1: out of memory",
        "warning: the effective batch size is now 16 instead of 32",
        "attempts:\n#  device",
        "completed after",
        "run folder: ",
    ):
        assert (ended.stderr.count(line), ended.stdout.count(line)) == (1, 0), line


NO_KEY = "the project's config has no key for it; refer to the key that its code reads: "
SMALL_GPUS = "robust.min_num_gpus=2: must not be above robust.num_gpus=1"
SEVERAL = "several values; add -m to sweep over them, or write a list: "
CHECKPOINTING = "robust.training.gradient_checkpointing"
UNSEEN = "a project's code does not see it; set the project's own key"
BOTH = (
    "the config has data.a.batch_size, data.b.batch_size; choose the key that the training uses: "
)


def test_mistakes_in_the_group_robust_are_one_line(world, foreign):
    for name, text in (
        ("data/both", "{a: {batch_size: 4}, b: {batch_size: 8}}"),
        ("data/bare", "{num_workers: 0}"),
        ("data/no_workers", "{batch_size: 32}"),
        ("trainer/bare", "{devices: 1}"),
    ):
        (foreign / f"configs/{name}.yaml").write_text(text)
    preload = "robust.trainer.preload_module"
    size, fixed = "robust.training.batch_size", "must not be above data.batch_size=32"
    lines = {
        "robust.num_gpu=2": "robust.num_gpu: no such key; did you mean robust.num_gpus?",
        "robust.num_gpus=0": "robust.num_gpus=0: must be 1 or more",
        "robust.min_batch_size=90": f"robust.min_batch_size=90: {fixed}",
        "robust.min_num_gpus=2": SMALL_GPUS,
        "robust.num_gpus=1,2": f"robust.num_gpus=1,2: {SEVERAL}robust.num_gpus=[1,2]",
        "robust.training.lr=0.1": f"robust.training.lr=0.1: {UNSEEN}",
        "robust.seed=1": f"robust.seed=1: {UNSEEN}",
        f"{CHECKPOINTING}=true": f"{CHECKPOINTING}=True: {NO_KEY}'{CHECKPOINTING}=${{its.name}}'",
        f"{preload}=[json]": f"{preload}: no such key; did you mean {preload}s?",
        f"{size}=8": f"{size}=8: the project has data.batch_size=32; set that",
        "data=both": f"{size}: {BOTH}'{size}=${{data.a.batch_size}}'",
    }
    for option, key in (
        ("data=bare", size),
        ("data=no_workers", "robust.training.num_workers"),
        ("trainer=bare", "robust.training.gradient_accumulation_steps"),
    ):
        lines[f"{option} {key}=3"] = f"{key}=3: {NO_KEY}'{key}=${{its.name}}'"
    for words, line in lines.items():
        ended = _run(world, foreign, *words.split(), code=2)
        assert ended.stderr.splitlines() == [line]
    world.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    ended = _run(world, foreign, "robust.detach=true", code=2)
    assert ended.stderr.startswith("robust.detach=true: not as a rank of the engine that")


def test_a_user_error_in_main_is_one_line(world, foreign):
    """The main function of a project raises it."""
    ended = _run(world, foreign, "fits=0", code=1)
    assert ended.stderr == "failed: fits=0: nothing does\n"


def test_messages_use_the_projects_own_keys(world, foreign):
    """Keys are written as the user of the project writes them."""
    ended = _run(world, foreign, "robust.device=cuda", code=2)
    assert ended.stderr.startswith("robust.device=cuda: no such GPU here: ")
    words = (
        "fits=1",
        "robust.num_gpus=2",
        "robust.max_retries=1",
        "robust.allow_cpu_fallback=true",
    )
    ended = _run(world, foreign, *words, code=1)
    folder = foreign / "out/train"
    (*_, last) = json.loads((folder / "summary.json").read_text())["attempts"]
    assert "smaller data.batch_size" in last["failure"]["advice"][0]
    assert "raise trainer.accumulate_grad_batches" in last["failure"]["advice"][1]
    log = (folder / "train.log").read_text()
    for text in (*last["failure"]["advice"], last["reason"], ended.stdout, ended.stderr, log):
        assert keys_at_the_root(text) == []
    assert "(robust.max_retries=1)" in last["reason"]
    assert "robust.num_gpus=2: " in log
    page = (folder / "report.html").read_text()
    assert "smaller data.batch_size" in page
    assert "smaller training.batch_size" not in page


OF_DATACLASSES = """
import sys
from dataclasses import dataclass, field
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
import robust_train

class Nothing:
    def write(self, text): pass
    def flush(self): pass

sys.stdout = sys.stderr = Nothing()

@dataclass
class Optimizer:
    lr: float = 0.1

@dataclass
class Config:
    batch_size: int = 8
    optimizer: Optimizer = field(default_factory=Optimizer)

ConfigStore.instance().store(name="mine", node=Config)

@robust_train.hydra_main(version_base=None, config_path=None, config_name="mine")
def main(cfg):
    config = OmegaConf.to_object(cfg)
    assert isinstance(config.optimizer, Optimizer)
    words = ["optimizer.lr=0.5", "robust.num_gpus=1"]
    assert sys.argv[1:] == words or "-m" in sys.argv, sys.argv  # a sweep's worker has the sweep's
    assert not any("++" in word for word in sys.argv), sys.argv
    return config.batch_size * config.optimizer.lr

if __name__ == "__main__":
    main()
"""


def test_configs_may_be_the_scripts_dataclasses(world):
    """The attempt imports the script under a name that differs from the name in the pickles."""
    (world.folder / "main.py").write_text(OF_DATACLASSES)
    _run(world, world.folder, "optimizer.lr=0.5", "robust.num_gpus=1")
    assert [summary["result"] for summary in _summaries(world.folder)] == [4]
    ended = _run(world, world.folder, "optimizer.rate=1", code=2)
    assert "did you mean optimizer.lr?" in ended.stderr or "accepted" in ended.stderr


OF_THE_LAUNCHER = """
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
import robust_train

ConfigStore.instance().store(name="mine", node={"net": {"kind": "${kind_of:cnn}"}})

@robust_train.hydra_main(version_base=None, config_path=None, config_name="mine")
def main(cfg):
    return cfg.net.kind

if __name__ == "__main__":
    OmegaConf.register_new_resolver("kind_of", lambda name: object())
    main()
"""


def test_a_resolver_missing_in_attempts_is_one_line(world):
    """Only the launcher has it. Its value is not text, so it is resolved again in the attempt."""
    (world.folder / "main.py").write_text(OF_THE_LAUNCHER)
    ended = _run(world, world.folder, "robust.num_gpus=1", code=1)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("failed: net.kind: the attempt has no resolver 'kind_of': ")
    assert "__main__" in line
    assert "Traceback" not in ended.output


GOES_ELSEWHERE = """
import os
from pathlib import Path
import robust_train

@robust_train.hydra_main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg, run):
    elsewhere = Path(__file__).parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    os.chdir(elsewhere)
    if cfg.x == 2 and run.resume_checkpoint is None:
        Path("two.ckpt").write_text("a checkpoint")
        run.checkpoint_saved("two.ckpt", step=1)
        raise ValueError("not at once")
    return float("nan") if cfg.x == 1 else cfg.x

if __name__ == "__main__":
    main()
"""


def test_inline_jobs_stay_in_their_sweep(world):
    """They say what has changed. A job that leaves the working directory does not take the next
    ones with it.
    """
    (world.folder / "conf").mkdir()
    for name, text in (("config", "{defaults: [_self_, mine], x: 1}"), ("mine", "lr: 1")):
        (world.folder / f"conf/{name}.yaml").write_text(text)
    (world.folder / "main.py").write_text(GOES_ELSEWHERE)
    words = ("-m", "x=1,2,3", "hydra.sweep.dir=sweep", "robust.isolation=none")
    first = _run(world, world.folder, *words, code=1)
    assert "without a rank: job 0: its result is not a number: nan" in first.output
    sweep = json.loads((world.folder / "sweep/sweep.json").read_text())
    assert [job["status"] for job in sweep["jobs"]] == ["completed", "failed", "completed"]
    assert sweep["jobs"][0]["not_finite"] == "nan"
    (world.folder / "conf/mine.yaml").write_text("lr: 2")
    again = _run(world, world.folder, *words, code=0)
    assert again.output.count("its config has changed since: conf/mine.yaml") == 2
    changed = "this launch uses the current config; changed since the last launch: conf/mine.yaml"
    assert again.output.count(changed) == 1


@pytest.mark.slow
def test_hydra_project_sweeps_have_tables_and_objectives(world, foreign):
    more = ("robust.sweep_patience=3",)
    first = _run(world, foreign, "-m", "data.batch_size=16,8", "fits=20", *more)
    line = "robust.sweep_patience=3: hydra/launcher=basic runs each job to its end"
    assert line in first.output
    sweep = json.loads((foreign / "out/sweep/sweep.json").read_text())
    assert [job["result"] for job in sweep["jobs"]] == [16, 8]
    more = ("hydra/launcher=gpu_queue", "robust.sweep_fail_fast=true")
    again = _run(world, foreign, "-m", "data.batch_size=16,8", "fits=20", *more)
    assert again.output.count("is not run again (robust.resume=true)") == 2
    assert keys_at_the_root(again.output) == []


OF_THE_STORE = """
from dataclasses import dataclass
from pathlib import Path
from hydra.core.config_store import ConfigStore
from robust_train import hydra_main

@dataclass
class Config:
    batch_size: int = 16
    lr: float = 0.1

ConfigStore.instance().store(name="config", node=Config)
ConfigStore.instance().store(group="model", name="cnn", node={"depth": 2})

@hydra_main(NAMES)
def main(cfg):
    with Path(__file__).with_name("ran").open("a") as file:
        print(*sorted(cfg), "in", Path.cwd().name, file=file)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("names", "words", "keys", "folders"),
    [
        ('None, "config", "1.3"', ["lr=1,2"], "batch_size lr", None),
        ("", ["+seed=1,2", "+model=cnn"], "model seed", ["0", "1"]),
    ],
    ids=["a node of the store", "no config at all, with Hydra's defaults"],
)
def test_a_job_needs_no_file(world, names, words, keys, folders):
    """Its keys are the program's own, and a sweep that is repeated runs nothing again.

    Args:
        folders: the working directories of the jobs; None: that of the command.
    """
    (world.folder / "main.py").write_text(OF_THE_STORE.replace("NAMES", names))
    words = [*words, "robust.isolation=none", "hydra.sweep.dir=sweep", "-m"]
    first = _run(world, world.folder, *words)
    assert "attempt 1" in first.output
    again = _run(world, world.folder, *words)
    assert again.output.count("is not run again") == 2
    assert first.output.count("version_base parameter is not specified") == (folders is not None)
    ran = [f"{keys} in {folder}" for folder in folders or [world.folder.name] * 2]
    assert (world.folder / "ran").read_text().splitlines() == ran
    sweep = json.loads((world.folder / "sweep/sweep.json").read_text())
    assert [job["status"] for job in sweep["jobs"]] == ["completed"] * 2


@pytest.mark.slow
def test_types_of_a_script_survive_hydras_launchers(world):
    """joblib, submitit and Ray carry them by value to a process that has no such module."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="the extra [sweep]")
    (world.folder / "main.py").write_text(OF_DATACLASSES)
    words = ("-m", "optimizer.lr=1,2", "hydra/launcher=joblib", "hydra.sweep.dir=sweep")
    _run(world, world.folder, *words)
    sweep = json.loads((world.folder / "sweep/sweep.json").read_text())
    assert sorted(job["result"] for job in sweep["jobs"]) == [8, 16]


def test_a_config_may_have_types_without_modules(tmp_path):
    @dataclass
    class Local:
        width: int = 3

    cfg = OmegaConf.create({"mine": OmegaConf.structured(Local)})
    assert launch(lambda cfg: cfg.mine.width, cfg, run_dir=tmp_path).result == 3


ON_ROBUST = """
import DECORATOR as decorator
from robust_train import launch

def train(cfg):
    with open("ran", "a") as file:
        print("trained", cfg.model.depth, file=file)
    return cfg.model.depth

@decorator(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    return launch(train, cfg).objective

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "decorator", [pytest.param("robust_train.hydra_main", marks=pytest.mark.slow), "hydra.main"]
)
def test_a_project_on_robust_keeps_its_groups(world, decorator):
    """A sweep over all of them trains each once."""
    module, _, name = decorator.partition(".")
    script = ON_ROBUST.replace("import DECORATOR", f"from {module} import {name}")
    files = {
        "main.py": script,
        "conf/config.yaml": """
            defaults: [robust, {model: a}, _self_]
            isolation: none
            hydra: {searchpath: [pkg://robust_train.configs]}
        """,
        "conf/model/a.yaml": "{depth: 2, weights: [1]}",
        "conf/model/b.yaml": "{depth: 3}",
    }
    for path, text in files.items():
        (world.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (world.folder / path).write_text(textwrap.dedent(text))
    words = ("-m", "model=glob(*)", "hydra.sweep.dir=sweep")
    for _ in range(2):
        _run(world, world.folder, *words)
    assert (world.folder / "ran").read_text().splitlines() == ["trained 2", "trained 3"]
    sweep = json.loads((world.folder / "sweep/sweep.json").read_text())
    assert [job["result"] for job in sweep["jobs"]] == [2, 3]


def test_options_of_hydras_may_follow_a_projects_overrides(world, own_project):
    shown = _run(world, own_project, "training.lr=1", "--cfg", "job", "--package", "training.lr")
    assert shown.stdout.strip() == "1.0"


def test_a_group_that_robust_lacks_is_named(world, own_project):
    config = own_project / "conf" / "config.yaml"
    config.write_text("defaults: [robust, override /dataset: none, _self_]\n")
    ended = _run(world, own_project, code=2)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("config: 'override /dataset: …' finds no group dataset before it")


def test_our_hydra_configs_have_unique_names():
    """All programs of the environment have them: that of another plugin would be merged with
    ours.
    """

    def stored(group):
        for node in group.values():
            yield from stored(node) if isinstance(node, dict) else [node]

    Plugins.instance()  # imports them
    ours = [
        (node.group, node.name.removesuffix(".yaml"))
        for node in stored(ConfigStore.instance().repo["hydra"])
        if node.provider == "robust_train"
    ]
    of_groups = {"launcher", "sweeper", "sweeper/sampler", "sweeper/pruner"}
    assert {group for group, _ in ours} == {f"hydra/{group}" for group in of_groups}
    assert [name for _, name in ours if not name.startswith("robust_")] == ["gpu_queue"]
