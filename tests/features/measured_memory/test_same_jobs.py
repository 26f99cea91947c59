"""Which jobs are the same job, as far as memory goes."""

import pytest

from robust_train.config.composition import complete
from robust_train.features.measured_memory.model import choose_reservation
from robust_train.features.measured_memory.recall import fingerprint_job, reserve_known_need
from robust_train.features.measured_memory.same_jobs import drop_labels, fingerprint, locate_program
from robust_train.launcher.plan import plan_job
from robust_train.readable import GIB

SMALL = {
    "model_name": "bert-base",
    "encoder": {"name": "resnet18"},
    "optimizer": {"name": "sgd"},
    "model": {"version": "s", "checkpoint": "facebook/opt-125m"},
    "output": {"dim": 10},
    "logger": {"wandb": {"name": "first"}},
}


@pytest.mark.parametrize(
    "other",
    [
        {**SMALL, "model_name": "bert-large"},
        {**SMALL, "encoder": {"name": "resnet152"}},
        {**SMALL, "optimizer": {"name": "adamw"}},
        {**SMALL, "model": {"version": "xl", "checkpoint": "facebook/opt-125m"}},
        {**SMALL, "model": {"version": "s", "checkpoint": "facebook/opt-13b"}},
        {**SMALL, "output": {"dim": 100000}},
    ],
)
def test_a_name_that_chooses_a_model_counts(other):
    assert fingerprint("train.py", SMALL) != fingerprint("train.py", other)


def test_the_name_of_a_logger_does_not_count():
    other = {**SMALL, "logger": {"wandb": {"name": "second"}}, "wandb_project": "x", "name": "y"}
    assert fingerprint("train.py", SMALL) == fingerprint("train.py", other)


@pytest.mark.parametrize(
    "word", ["--model_name=xl", "model.name=xl", "--version=2", "--ckpt=opt-13b", "--config-name=b"]
)
def test_a_word_that_chooses_a_model_counts(word):
    assert drop_labels(["python", "t.py", word]) == ["python", "t.py", word]


def test_a_module_of_another_folder_counts():
    """Two projects may both have a ``train``."""
    argv = ["python", "-m", "train"]
    assert locate_program(argv, "/a") != locate_program(argv, "/b")
    assert locate_program(argv, "/a") == locate_program(argv, "/a")
    script = ["python", "/a/train.py"]
    assert locate_program(script, "/a") == locate_program(script, "/b")


@pytest.mark.parametrize(
    ("peak", "expected"),
    [(10 * GIB, 11 * GIB), (37 * GIB, 38 * GIB), (39 * GIB, 39 * GIB), (60 * GIB, 38 * GIB)],
)
def test_a_margin_never_keeps_a_job_out(peak, expected):
    """On a GPU of 40 GiB, of which a desktop may hold a little."""
    assert choose_reservation(peak, 40 * GIB) == expected


PROJECT = {
    "robust": {},
    "data": {"batch_size": 32},
    "trainer": {"precision": 16},
    "callbacks": {"checkpoint": {"dirpath": "${paths.output_dir}/checkpoints"}},
    "paths": {"output_dir": "runs/${now:%f}"},
}


def digest(tmp_path, cfg, folder):
    return fingerprint_job(plan_job(len, complete(cfg), tmp_path / folder, remedies={}))


@pytest.fixture(autouse=True)
def _with_the_time(monkeypatch):
    from hydra.core.utils import setup_globals

    setup_globals()


@pytest.mark.parametrize("key", ["data", "robust", "paths"])
def test_a_project_in_another_folder_is_the_same(tmp_path, key):
    """In a folder named after another time, also at another micro-batch."""
    other = {**PROJECT, "data": {"batch_size": 64}} if key == "data" else PROJECT
    assert digest(tmp_path, PROJECT, "first") == digest(tmp_path, other, "second")


def test_groups_of_a_project_count(tmp_path):
    """Even those that have the name of one of ours."""
    other = {**PROJECT, "trainer": {"precision": 32}}
    assert digest(tmp_path, PROJECT, "first") != digest(tmp_path, other, "second")


def test_arguments_of_a_trainer_count(tmp_path):
    other = {"trainer": {"width": 8}}
    assert digest(tmp_path, {}, "first") != digest(tmp_path, other, "second")


def test_keys_of_the_launcher_do_not_count(tmp_path):
    other = {"stall_timeout_minutes": 7, "min_gpu_memory_mb": "auto", "training": {"epochs": 3}}
    assert digest(tmp_path, {}, "first") == digest(tmp_path, other, "second")


def test_a_function_of_another_folder_counts(tmp_path, monkeypatch):
    digests = set()
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "same_name.py").write_text("def train(cfg): ...")
        monkeypatch.syspath_prepend(str(folder))
        cfg = complete({"trainer": {"_target_": "same_name.train"}})
        digests.add(fingerprint_job(plan_job(None, cfg, folder / "run", remedies={})))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device": "cpu"}, []),
        ({"device": "cpu", "auto_device": True}, ["not measured yet"]),
        ({"isolation": "none"}, ["are not measured"]),
    ],
)
def test_a_measurement_is_promised_only_on_gpus(tmp_path, caplog, monkeypatch, keys, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level("INFO", "robust_train")
    cfg = complete({**keys, "min_gpu_memory_mb": "auto"})
    reserve_known_need(plan_job(len, cfg, tmp_path / "run", remedies={}))
    assert [words in line for words, line in zip(said, caplog.messages, strict=True)] == [
        True for _ in said
    ]
