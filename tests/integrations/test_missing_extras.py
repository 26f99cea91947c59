"""What people see who have not installed a framework."""

from __future__ import annotations

import pytest

from world import World

EXAMPLES = {
    "lightning": "lightning_digits",
    "transformers": "transformers_sonnets",
    "accelerate": "accelerate_digits",
}


@pytest.fixture(params=EXAMPLES)
def missing(request: pytest.FixtureRequest, world: World) -> str:
    """Have one framework fail to import as if it were not there; its name."""
    name = request.param
    hidden = world.folder / "hidden" / name
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text(
        f'raise ModuleNotFoundError("No module named {name!r}", name={name!r})\n'
    )
    world.environ["PYTHONPATH"] = f"{hidden.parent}:{world.environ['PYTHONPATH']}"
    return name


def test_the_example_ends_in_one_line_that_says_what_to_install(missing: str, world: World):
    ended = world.run(f"trainer._target_=examples.{EXAMPLES[missing]}.train.train")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f'pip install "robust-train[{missing}]"' in ended.stderr


def test_so_does_a_trainer_that_imports_our_module_first(missing: str, world: World):
    (world.folder / "mine.py").write_text(
        f"import robust_train.integrations.{missing}\ndef train(cfg, run): ...\n"
    )
    world.environ["PYTHONPATH"] += f":{world.folder}"
    ended = world.run("trainer._target_=mine.train")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"needs {missing}, which is not installed" in ended.stderr
    assert f'pip install "robust-train[{missing}]"' in ended.stderr
