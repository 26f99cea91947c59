"""What a trainer supports is declared by it, or seen in what it reads."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from omegaconf import OmegaConf

from robust_train.attempt.runner import run_attempt
from robust_train.config.attempt import AttemptRequest
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.trainers import TrainerRef
from robust_train.model.events import Event, Failed, TrainerSupports
from robust_train.model.failure import FailureKind
from robust_train.model.spec import AttemptSpec


def reads_it(cfg):
    return cfg.training.gradient_checkpointing


def logs_all_keys(cfg):
    OmegaConf.to_container(cfg)


def reads_nothing(cfg):
    raise MemoryError


class Declares:
    def __init__(self, *features: str) -> None:
        self.supports = set(features)

    def __call__(self, cfg):
        return logs_all_keys(cfg) or reads_nothing(cfg)


def events_of(trainer, folder, begins=lambda stop: None):
    cfg = complete({"device": "cpu", "memory": {"sample_interval_ms": 0}})
    events: list[Event] = []
    request = AttemptRequest(
        trainer=TrainerRef("own.train"),
        cfg=cfg,
        hydra_cfg=None,
        config=checked(cfg),
        spec=AttemptSpec((), 8, 1),
        attempt=1,
        run_dir=folder,
        resume_checkpoint=None,
        environ={},
        cwd=str(folder),
    )
    run_attempt(
        request,
        lambda: trainer,
        events.append,
        stopping=lambda stop: nullcontext(begins(stop)),
        process_ends=False,
    )
    return events


@pytest.mark.parametrize(
    ("trainer", "supports_checkpointing"),
    [
        (reads_it, True),
        (reads_nothing, False),
        (Declares("gradient_checkpointing"), True),
        (Declares("num_workers"), False),
        (Declares(), False),
    ],
)
def test_a_declaration_counts_more_than_what_is_read(trainer, supports_checkpointing, tmp_path):
    events = events_of(trainer, tmp_path)
    found = any(isinstance(event, TrainerSupports) for event in events)
    assert found is supports_checkpointing


@pytest.mark.parametrize(
    ("trainer", "has_workers"), [(Declares("num_workers"), True), (Declares(), False)]
)
def test_workers_that_are_not_declared_are_no_remedy(trainer, has_workers, tmp_path):
    (ending,) = (one for one in events_of(trainer, tmp_path) if isinstance(one, Failed))
    assert ending.failure.evidence.no_workers is not has_workers


def test_a_feature_that_does_not_exist_is_refused_in_a_line(tmp_path):
    events = events_of(Declares("gradient_checkpoint"), tmp_path)
    (ending,) = (one for one in events if isinstance(one, Failed))
    line = "supports='gradient_checkpoint': no such feature; did you mean gradient_checkpointing?"
    assert ending.failure.message == line


def test_a_signal_that_waited_for_an_attempt_to_begin_ends_it_in_order(tmp_path):
    events = events_of(reads_nothing, tmp_path, begins=lambda stop: stop())
    (ending,) = (one for one in events if isinstance(one, Failed))
    assert ending.failure.kind is FailureKind.INTERRUPTED
