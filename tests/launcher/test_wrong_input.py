"""A user's mistake: one line, exit code 2, no traceback, nothing started."""

import resource
import subprocess
import sys

import hydra
import pytest

from robust_train.config.checks import checked
from robust_train.config.refusals import REFUSALS, explain, explain_option

OF_THE_COMMAND = [
    (["training.batchsize=8"], ["training.batchsize=8", "batch_size", "no such key"]),
    (["--config-name", "rubust"], ["rubust"]),
    (["training.seed=3"], ["training.seed=3: no such key; did you mean seed?"]),
    (["robust.num_gpus=2"], ["robust.num_gpus=2: no such key; did you mean num_gpus?"]),
    (["training.batch_size=0"], ["training.batch_size=0", "1 or more"]),
    (["trainer._target_=no_such_module.train"], ["no_such_module.train", "Python path"]),
    (["dataset=image_folder", "dataset.root=/no/such"], ["dataset.root=/no/such"]),
    (["logger=tensorbord"], ["logger=tensorbord: did you mean tensorboard?"]),
    (["trainer._target_=trainers"], ["trainer._target_=trainers", "package.module.function"]),
]
OF_THE_CONFIGURATION = [
    (["training.batch_size=many"], ["training.batch_size=many", "an integer"]),
    (["model=transformer"], ["model=transformer", "cnn", "lora", "linear_probe"]),
    (["model=lora", "model.lora_rr=4"], ["model.lora_rr=4", "did you mean model.lora_r?"]),
    (["training.lr=[1"], ["training.lr=[1", "not an override"]),
    (["training.lr=${no.such.key}"], ["training.lr", "no.such.key"]),
    (["dataset=image_folder"], ["dataset.root", "must be given"]),
    (["min_batch_size=65"], ["min_batch_size=65", "training.batch_size=64"]),
    (["device=gpu7", "auto_device=false"], ["device=gpu7", "cuda:<number>"]),
    (["memory.fraction=1.5"], ["memory.fraction=1.5", "at most 1"]),
    (["isolation=docker"], ["isolation=docker", "process, none"]),
    (["min_batchsize=8"], ["min_batchsize=8", "did you mean min_batch_size?"]),
    (["epochs=3"], ["epochs=3", "did you mean training.epochs?"]),
    (["lora_r=3", "model=lora"], ["lora_r=3", "did you mean model.lora_r?"]),
    (["batch_size=8"], ["batch_size=8", "did you mean training.batch_size?"]),
    (["dataset=imagenet"], ["dataset=imagenet", "digits", "flowers102"]),
    (["training.gradient_accumulation_steps=0"], ["gradient_accumulation_steps=0"]),
    (["training.batch_size=atuo"], ["training.batch_size=atuo", "an integer or auto"]),
    (["training.lr=-1"], ["training.lr=-1", "more than 0"]),
    (["training.lr=nan"], ["training.lr=nan", "more than 0"]),
    (["memory.empty_cache_treshold=0.1"], ["did you mean memory.empty_cache_threshold?"]),
    (["memory.empty_cache_threshold=50"], ["empty_cache_threshold=50", "from 0 to 1"]),
    (["memory.empty_cache_frequency=often"], ["empty_cache_frequency=often", "an integer"]),
    (["memory.samples=100ms"], ["memory.samples=100ms: must be true or false"]),
    (["memory.clear_on_start=maybe"], ["clear_on_start=maybe", "true or false"]),
    (["max_retries=-1"], ["max_retries=-1", "0 or more"]),
    (["gpu_check_interval_seconds=0"], ["gpu_check_interval_seconds=0"]),
    (["num_gpus=0"], ["num_gpus=0: must be 1 or more"]),
    (["num_gpus=2", "min_num_gpus=3"], ["min_num_gpus=3: must not be above num_gpus=2"]),
    (["num_gpus=2", "isolation=none"], ["num_gpus=2: every GPU needs a separate process"]),
]


@pytest.mark.parametrize(("arguments", "words"), OF_THE_COMMAND, ids=str)
def test_the_command_refuses_in_one_line(world, arguments, words):
    # which trainer it is does not matter but for its own name and for keys of the built-in one
    of_a_trainer = ("trainer._target_", "dataset.root", "logger")
    is_light = not any(argument.startswith(of_a_trainer) for argument in arguments)
    light = ("trainer._target_=trainers.uses_run",) if is_light else ()
    ended = world.run(*arguments, *light)
    ended.was_refused(words)
    started = world.run_dir / "journal.jsonl"
    assert not started.exists() or "attempt_started" not in started.read_text()
    if "root" in words[0] or "no_such_module" in words[0]:
        assert not world.run_dir.exists()


@pytest.mark.parametrize(("arguments", "words"), OF_THE_CONFIGURATION, ids=str)
def test_a_configuration_is_refused_in_one_line(arguments, words):
    with (
        hydra.initialize_config_module("robust_train.configs", version_base="1.3"),
        pytest.raises(REFUSALS) as refused,
    ):
        checked(hydra.compose("robust", overrides=arguments))
    message = explain(refused.value, "robust", arguments)
    assert len(message.splitlines()) == 1, message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "write"),
    [
        (["model=cnn", "--modle=lora"], "write model=lora"),
        (["--epochs", "3"], "write training.epochs=3"),
        (["--batch-size=32", "-m"], "write training.batch_size=32"),
        (["--frobnicate"], "write KEY=VALUE"),
        (["model=cnn", "-m", "seed=1,2"], "write -m and other options before the first override"),
    ],
)
def test_dashed_overrides_get_the_right_spelling(arguments, write):
    assert explain_option(arguments, "robust").endswith(write)
    assert explain_option(["-m", "--config-name", "robust", "model=cnn"], "robust") is None


def test_targets_must_be_callable(world):
    """Only the import in the first attempt can show it; the refusal is one line."""
    world.run("trainer._target_=trainers.json").was_refused(["trainers.json", "not callable"])
    world.run("trainer._target_=trainers.no_such").was_refused(["no_such", "trainers"])


def test_a_failing_module_is_named_with_its_line(world):
    module = "import json\n\nundefined_name\n\ndef train(cfg): ...\n"
    (world.folder / "broken_trainer.py").write_text(module)
    world.environ["PYTHONPATH"] += f":{world.folder}"
    ended = world.run("trainer._target_=broken_trainer.train")
    ended.was_refused(["NameError", "broken_trainer.py, line 3"])


def test_working_directory_trainers_keep_their_exit_codes(world):
    """A mistake in one keeps its exit code, even if a folder of the command itself has a module of
    the same name.
    """
    (world.folder / "train.py").write_text("def train(cfg, run): return 1.5\n")
    main = [sys.executable, "-m", "robust_train.cli.main", "train"]
    words = ["trainer._target_=train.train", "model=none", "dataset=none"]
    assert world.run(*words, code=0).summary["result"] == 1.5
    refused = subprocess.run(
        [*main, *words, "epochs=3"],
        cwd=world.folder,
        env=world.environ | {"HYDRA_FULL_ERROR": "1", "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "Traceback" in refused.stderr
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("epochs=3: no such key; did you mean training.epochs? A key of your own")


def test_an_unwritable_run_folder_is_named(world):
    blocked = world.folder / "blocked"
    blocked.write_text("a file, not a folder")
    world.run_dir = blocked / "run"
    world.run().was_refused([str(blocked)])


def test_help_starts_nothing(world):
    ended = world.run("--help", code=0)
    assert ended.stdout.startswith("usage: python train_robust.py ")
    assert "min_gpu_memory_mb" in ended.stdout
    assert "schema" not in ended.stdout, "nobody can choose those"
    assert not world.run_dir.exists()


def test_a_limit_too_low_for_torch_is_explained(world):
    """The message is one line."""
    limit = (400 << 20, 400 << 20)
    ended = world.run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit))
    ended.was_refused(["400 MiB (ulimit -d)", "no room to import torch"])
    assert ended.summary["attempts"] == []
