"""What a trainer supports is declared by it, or seen in what it reads."""

from contextlib import nullcontext

import pytest
from omegaconf import OmegaConf

from attempts import attempt_request
from robust_train.attempt.runner import run_attempt
from robust_train.model.events import Failed, TrainerSupports
from robust_train.model.failure import FailureKind


def reads_it(cfg):
    return cfg.training.gradient_checkpointing


def logs_all_keys(cfg):
    OmegaConf.to_container(cfg)


def reads_nothing(cfg):
    raise MemoryError


class Declares:
    def __init__(self, *features):
        self.supports = set(features)

    def __call__(self, cfg):
        return logs_all_keys(cfg) or reads_nothing(cfg)


def events_of(trainer, folder, begins=lambda stop: None):
    keys = {"device": "cpu", "memory": {"samples": False}}
    events = []
    run_attempt(
        attempt_request(folder, keys=keys),
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
    declarations = [
        event for event in events_of(trainer, tmp_path) if isinstance(event, TrainerSupports)
    ]
    assert bool(declarations) is supports_checkpointing


def failure_of(trainer, folder, **more):
    (ending,) = (event for event in events_of(trainer, folder, **more) if isinstance(event, Failed))
    return ending.failure


def test_an_unknown_feature_is_refused_in_one_line(tmp_path):
    line = "supports='gradient_checkpoint': no such feature; did you mean gradient_checkpointing?"
    assert failure_of(Declares("gradient_checkpoint"), tmp_path).message == line


def test_a_signal_before_an_attempt_ends_it_properly(tmp_path):
    """The signal has waited for the attempt to begin."""
    failure = failure_of(reads_nothing, tmp_path, begins=lambda stop: stop())
    assert failure.kind is FailureKind.INTERRUPTED
