"""The message for people who have not installed a framework."""

import importlib
import sys

import pytest

from robust_train.model.errors import ConfigError

FRAMEWORKS = ("lightning", "transformers", "accelerate")


@pytest.mark.parametrize("missing", FRAMEWORKS)
def test_our_module_names_the_missing_extra(missing, monkeypatch):
    """One line says what to install."""
    for name in [m for m in sys.modules if m.startswith((missing, "robust_train.integrations"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError) as refused:
        importlib.import_module(f"robust_train.integrations.{missing}")
    assert f"needs {missing}, which is not installed" in str(refused.value)
    assert f'pip install "robust-train[{missing}]"' in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_real_command_ends_in_that_line(world):
    hidden = world.folder / "hidden" / "lightning"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'lightning'\", name='lightning')\n"
    )
    world.environ["PYTHONPATH"] = f"{hidden.parent}:{world.environ['PYTHONPATH']}"
    ended = world.run("trainer._target_=examples.lightning_digits.train.train")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert 'pip install "robust-train[lightning]"' in ended.stderr
