"""A launcher chosen where Hydra would silently ignore it: one line, exit code 2, nothing run."""

import pytest

SWEPT = "training.seed=1,2"
IN_A_FILE = "# @package _global_\ndefaults:\n  - override {}hydra/launcher: gpu_queue\n"


@pytest.mark.parametrize(
    ("arguments", "script", "words"),
    [
        (["hydra/launcher=gpu_queue"], "train_robust.py", ["hydra/launcher=gpu_queue", "add -m"]),
        (["hydra/launcher=gpu_queue"], "train.py", ["hydra/launcher=gpu_queue", "add -m"]),
        ([SWEPT], "train_robust.py", [SWEPT, "-m"]),
    ],
)
def test_without_m(sweeps, arguments, script, words):
    trainer = "trainer._target_=sweep_trainers.objective"
    sweeps.world.run(trainer, *arguments, script=script).was_refused(words)
    assert sweeps.ran == []


@pytest.mark.parametrize(
    ("file", "content", "more", "words"),
    [
        pytest.param(
            *("experiment/one", IN_A_FILE.format("/"), ["+experiment=one,two"]),
            ["gpu_queue", "put hydra/launcher=gpu_queue on the command line"],
            marks=pytest.mark.slow,
            id="that the sweep varies",
        ),
        pytest.param(
            *("experiment/one", IN_A_FILE.format(""), ["+experiment=one", SWEPT]),
            ["override /hydra/launcher: ", "experiment"],
            id="with a relative path",
        ),
        pytest.param(
            *("mine", "defaults:\n  - override hydra/launcher: gpu_queue\n  - robust\n"),
            [SWEPT],
            ["hydra/launcher: gpu_queue", "end of the defaults list"],
            id="in front of other entries",
        ),
        pytest.param(
            *("experiment/one", IN_A_FILE.format("/"), ["+experiment=one", SWEPT], []),
            marks=pytest.mark.slow,
            id="that is not varied, where it counts",
        ),
    ],
)
def test_in_a_file(sweeps, file, content, more, words):
    folder = sweeps.world.folder / "conf"
    for name in {file, file.replace("one", "two")}:
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    arguments = sweeps.arguments("objective", n_jobs=None)
    arguments.remove("hydra/launcher=gpu_queue")
    name = "mine" if file == "mine" else "robust"
    chosen = ("--config-dir", str(folder), "--config-name", name)
    ended = sweeps.world.run(*chosen, *arguments, *more)
    if words:
        ended.was_refused(words)
        assert sweeps.ran == []
    else:
        assert sweeps.table["launcher"] == "gpu_queue"
