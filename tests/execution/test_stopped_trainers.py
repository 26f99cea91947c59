"""What becomes of a trainer that is asked to stop, in this process."""

from contextlib import nullcontext

import pytest

from attempts import attempt_request
from robust_train.attempt.run import live_of
from robust_train.attempt.runner import run_attempt
from robust_train.config.training_plans import SavePlan
from robust_train.launcher.rank_ends import RankEnd, merge_ends
from robust_train.model.events import Failed, Finished
from robust_train.model.failure import Failure, FailureKind


def ending_of(trainer, folder):
    """The event of the end of ``trainer``, whose argument ``stop`` is what a signal calls."""
    ends, stops = [], []

    def stopping(stop):
        stops.append(stop)
        return nullcontext()

    def takes_run(cfg, run):
        return trainer(run, stops[0])

    def take(event):
        if isinstance(event, (Finished, Failed)):
            ends.append(event)

    keys = {"device": "cpu", "memory": {"samples": False}}
    request = attempt_request(folder, keys=keys)
    run_attempt(request, lambda: takes_run, take, stopping=stopping, process_ends=False)
    (end,) = ends
    return end


@pytest.mark.parametrize("goes_on", ["should_save", "backward"])
def test_a_trainer_that_only_saves_is_stopped_afterwards(tmp_path, goes_on):
    """It asks only whether to save, so it is stopped after its last checkpoint."""
    saved = []

    def train(run, stop):
        live_of(run).saving.follow(SavePlan(1e9))
        for step in range(1, 10):
            if goes_on == "backward" and saved:
                run.backward(None, None)
            run.progress(step, total_steps=9)
            if run.should_save():
                saved.append(step)
            if step == 2:
                stop()

    end = ending_of(train, tmp_path)
    assert end.failure.kind is FailureKind.INTERRUPTED
    assert (saved, end.step) == ([3], 4 if goes_on == "should_save" else 3)


def test_a_trainer_reading_both_flags_ends_by_itself(tmp_path):
    """It reads whether to save and whether to stop, and saves once."""

    def train(run, stop):
        live_of(run).saving.follow(SavePlan(1e9))
        saved = []
        for step in range(1, 10):
            run.progress(step)
            if run.should_save():
                saved.append(step)
            stops = run.should_stop()
            if step == 2:
                stop()
            if stops and step == 5:  # it has something to do first
                raise KeyboardInterrupt(f"saved {saved}")

    assert ending_of(train, tmp_path).failure.message == "saved [3]"


@pytest.mark.parametrize("total_steps", [2, 3, None])
def test_a_stop_after_the_last_step_keeps_results(tmp_path, total_steps):
    def train(run, stop):
        assert not run.should_stop()
        run.progress(2, total_steps=total_steps)
        stop()
        assert run.should_stop()
        return 0.5

    end = ending_of(train, tmp_path)
    if total_steps == 2:
        assert end.result == 0.5
    else:
        assert end.failure.kind is FailureKind.INTERRUPTED


def test_ranks_stopped_after_the_last_step_change_nothing():
    """The first rank has completed its last step."""
    stopped = Failed(Failure(FailureKind.INTERRUPTED, "it was asked to stop, and did"))
    ends = [RankEnd(0, 7, Finished(0.5)), RankEnd(1, 8, stopped, 1.0, 1)]
    assert merge_ends(ends).result == 0.5
