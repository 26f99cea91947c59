"""A resolver is evaluated once a job: attempts, later launches and the caller see one value."""

import contextlib
import itertools
import json
import os
import time
from pathlib import Path

import pytest
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from robust_train import launch


@pytest.fixture
def config():
    numbers = itertools.count(1)
    resolvers = {
        "numbered": (lambda *words: f"{'-'.join(map(str, words))}{next(numbers)}", False),
        "cached": (lambda: next(numbers), True),
        "doubled": (lambda size: 2 * size, True),
        "listed": (lambda: [next(numbers), {"of": [next(numbers)]}], False),
        "secret": (lambda: {"user": "me", "password": f"p{next(numbers)}"}, False),
        "looks": (lambda _root_: f"at {_root_.training.batch_size}", False),
    }
    for name, (resolver, is_cached) in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, use_cache=is_cached)
    yield OmegaConf.create(
        {
            "device": "cpu",
            "isolation": "none",
            "training": {"batch_size": 8},
            "min_batch_size": 1,
            "read": "${cached:}",
            "name": "${numbered:run}",
            "split": "${listed:}",
            "login": "${secret:}",
            "other": "${numbered:run}",
            "same": "${name}",
            "of_batch": "${numbered:run,${training.batch_size}}",
            "mixed": "${numbered:}/${training.batch_size}",
            "looks": "${looks:}",
            "double": "${doubled:${training.batch_size}}",
            "api_key": "${numbered:sk}",
        }
    )
    for name in resolvers:
        OmegaConf.clear_resolver(name)


KEYS = ("read", "name", "split", "login", "other", "same", "of_batch", "mixed", "looks", "double")
KEYS += ("api_key",)


def launched(config, *, fails_below=9):
    """Launch a job that needs a micro-batch of at most 4; return what each attempt has read."""
    seen = []

    def train(cfg):
        seen.append({key: cfg[key] for key in KEYS})
        if cfg.training.batch_size > 4:
            raise MemoryError
        if cfg.training.batch_size < fails_below:
            raise ValueError("the first launch ends here")

    with contextlib.suppress(ValueError):
        launch(train, config, run_dir="run")
    return seen


def test_attempts_agree_with_the_caller_on_values(config, tmp_path, monkeypatch):
    """They agree with each other as well."""
    monkeypatch.chdir(tmp_path)
    read_before = config.read
    assert config.double == 16
    first, second = launched(config, fails_below=0)
    assert first["read"] == read_before
    assert first["name"] == first["same"] != first["other"]
    changed = {key for key in KEYS if first[key] != second[key]}
    assert changed == {"of_batch", "mixed", "looks", "double"}
    assert second["double"] == 8
    assert second["looks"] == "at 4", "it is given the config, and looks again"
    assert first["mixed"].removesuffix("/8") == second["mixed"].removesuffix("/4")


def test_a_later_launch_sees_its_jobs_values(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config.read = "${numbered:read}"
    before = launched(config)
    written = json.loads(Path("run/resolved.json").read_text())
    assert {entry["key"] for entry in written["values"]} == set(KEYS) - {
        "api_key",
        "login",
        "same",
        "looks",
    }
    again = launched(config, fails_below=0)
    assert {key for key in KEYS if before[0][key] != again[0][key]} == {"api_key", "login"}
    new = launched(config, fails_below=0)
    assert new[0]["name"] != again[0]["name"], "the job has completed, so this is another one"


def test_values_that_later_launches_lack_are_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    OmegaConf.register_new_resolver("env", os.environ.get)
    OmegaConf.register_new_resolver("now", lambda: time.monotonic_ns(), replace=True)
    config = OmegaConf.create(
        {"device": "cpu", "isolation": "none", "data": "${env:DATA}", "at": "${now:}"}
    )
    seen = []

    def train(cfg):
        seen.append(cfg.data)
        if cfg.data == "bad":
            raise ValueError("no such folder")

    monkeypatch.setenv("DATA", "bad")
    with contextlib.suppress(ValueError):
        launch(train, config, run_dir="run")
    assert "keep the values" not in caplog.text
    monkeypatch.setenv("DATA", "good")
    with contextlib.suppress(ValueError):
        launch(train, config, run_dir="run")
    assert "first launch: data=bad (now good); to change one, give it: 'data=…'" in caplog.text
    config.data = "good"
    launch(train, config, run_dir="run")
    assert seen == ["bad", "bad", "good"]
    OmegaConf.clear_resolver("env")
    setup_globals()
