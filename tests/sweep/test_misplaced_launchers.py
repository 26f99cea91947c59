"""A launcher chosen where Hydra would silently ignore it: one line, exit code 2, nothing run."""

import pytest

SWEPT = "seed=1,2"
OURS = "hydra/launcher=gpu_queue"
IN_A_FILE = "# @package _global_\ndefaults:\n  - override {}hydra/launcher: gpu_queue\n"
IN_FRONT = "defaults:\n  - override hydra/launcher: gpu_queue\n  - robust\n"


@pytest.mark.parametrize(
    ("word", "script", "words"),
    [
        (OURS, "train_robust.py", [OURS, "add -m"]),
        (OURS, "train.py", [OURS, "add -m"]),
        (SWEPT, "train_robust.py", [SWEPT, "-m"]),
    ],
)
def test_without_m(sweeps, word, script, words):
    trainer = "trainer._target_=sweep_trainers.objective"
    sweeps.world.run(trainer, word, script=script).was_refused(words)
    assert sweeps.ran == []


@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    [
        ("experiment/one", IN_A_FILE.format(""), ["+experiment=one", SWEPT], ["override /hydra"]),
        ("mine", IN_FRONT, [SWEPT], ["hydra/launcher: gpu_queue", "end of the defaults list"]),
        ("experiment/one", IN_A_FILE.format("/"), ["+experiment=one,two"], [f"put {OURS} on the"]),
        ("experiment/one", IN_A_FILE.format("/"), ["+experiment=one", SWEPT], []),
    ],
    ids=["a relative path", "in front of others", "varied by the sweep", "where it counts"],
)
def test_in_a_file(sweeps, name, content, more, words):
    folder = sweeps.world.folder / "conf"
    for file in {name, name.replace("one", "two")}:
        path = folder / f"{file}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    arguments = sweeps.arguments("objective", n_jobs=None)
    arguments.remove(OURS)
    config = "mine" if name == "mine" else "robust"
    chosen = ("--config-dir", str(folder), "--config-name", config)
    ended = sweeps.world.run(*chosen, *arguments, *more)
    if words:
        ended.was_refused(words)
        assert sweeps.ran == []
    else:
        assert sweeps.table["launcher"] == "gpu_queue"
