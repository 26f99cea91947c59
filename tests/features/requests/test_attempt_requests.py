"""What an attempt makes of requests: real files, a real run, real optimizers."""

import contextlib
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from robust_train.attempt import runner
from robust_train.attempt.run import Run, live_of
from robust_train.config.training_plans import MicroBatchPlan, SavePlan
from robust_train.features.requests.attempt import Requests
from robust_train.files import replacing
from robust_train.folder.requests import REQUESTS, TAKEN, find_requests, open_requests
from taking_part import hooked, trained
from watched_run import WatchedRun
from world import wait_until


class Asking:
    """An attempt of this process, and a client that writes requests for it."""

    def __init__(self, folder, **options):
        self.run = WatchedRun(folder, **options)
        live_of(self.run).saving.follow(SavePlan(every_seconds=1e9))
        self.path = folder / REQUESTS
        open_requests(folder)
        self.requests = hooked(self.run, Requests)
        self._number = 0

    def ask(self, verb, **options):
        """Make a request and wait until it is taken."""
        self._number += 1
        path = self.path / f"{self._number:04}.json"
        waiting = len(self.requests.waiting)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"verb": verb, "options": options}))
        wait_until(lambda: not path.exists(), "it is taken")
        if verb != "figures":
            wait_until(lambda: len(self.requests.waiting) > waiting, "it waits for a boundary")
        return self._number

    def has_replied(self):
        return (self.path / f"{self._number:04}.answer").exists()

    def reply(self, number=0):
        """The answer to one request, by default the last."""
        answer = self.path / f"{number or self._number:04}.answer"
        wait_until(answer.exists, "it is answered")
        return json.loads(answer.read_text())


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Begins attempts."""
    monkeypatch.setattr(runner, "TICK_SECONDS", 0.01)
    with contextlib.ExitStack() as begun:

        def begin(**options):
            asking = Asking(tmp_path, **options)
            begun.callback(asking.requests.close, None)
            begun.enter_context(trained(asking.run))
            return asking

        yield begin


@pytest.fixture
def asking(attempt):
    return attempt()


def test_a_checkpoint_request_is_answered_after_saving(asking):
    """It is answered as well if the checkpoint cannot be saved."""
    assert not asking.run.should_save()
    for _ in range(2):
        asking.ask("checkpoint")
    assert asking.run.should_save()
    assert not asking.has_replied()
    asking.run.checkpoint_saved(Path("somewhere"), 7)
    assert not asking.run.should_save()
    for number in (1, 2):
        assert asking.reply(number)["answer"] == {"path": "somewhere", "step": 7}
    asking.ask("checkpoint")
    assert asking.run.should_save()
    asking.run.checkpoint_failed("No space left on device")
    assert asking.reply()["error"] == "no checkpoint: No space left on device"
    assert not asking.run.should_save(), "it is not tried for ever"


def test_a_request_costs_one_save_in_the_background(asking):
    """Although steps follow before it is written."""
    live = live_of(asking.run)
    is_free = threading.Event()
    live.saving.writer.submit(is_free.wait)
    asking.ask("checkpoint")
    assert asking.run.should_save()
    asking.run.save({}, 1)
    assert not asking.run.should_save()
    assert not asking.has_replied()
    asking.ask("checkpoint")
    assert asking.run.should_save(), (
        "the checkpoint that is being written is older than this request"
    )
    is_free.set()
    live.saves.finish()
    assert asking.reply(1)["answer"]["step"] == 1


def test_a_trainer_gets_one_round_before_a_refusal(asking):
    """One round of its loop shows which hooks it calls."""
    asking.ask("checkpoint")
    asking.run.progress(1)
    assert not asking.run.should_stop()
    assert not asking.has_replied()
    asking.run.progress(2)
    error = asking.reply()["error"]
    assert "does not call run.should_save()" in error
    assert "'robust-train stop', which saves a checkpoint first" in error
    assert not asking.run.should_save()


def test_a_late_look_in_the_loop_is_accepted(asking):
    asking.ask("checkpoint")
    for step in range(1, 10):
        asking.run.progress(step)
        assert step > 1 or asking.run.should_save()
    assert not asking.has_replied(), "it is in the middle of something"


def test_no_request_halves_an_unsplittable_batch(asking):
    live_of(asking.run).parts.split_by(MicroBatchPlan(batch_size=8))
    live_of(asking.run).parts.keep_batch("nobody accumulates")
    asking.ask("halve_batch")
    assert not asking.run.should_stop()
    assert asking.reply()["error"].endswith("would change the training: nobody accumulates")
    live_of(asking.run).parts.keep_batch("")
    asking.ask("halve_batch")
    assert not asking.run.should_stop()  # it may split its first batch yet
    assert not asking.has_replied()
    assert not asking.run.should_stop()
    assert "does not use run.backward" in asking.reply()["error"]


def test_halving_before_the_first_split_waits_for_it(asking):
    live_of(asking.run).parts.split_by(MicroBatchPlan(batch_size=8, min_batch_size=4))
    asking.ask("halve_batch")
    assert not asking.run.should_stop()  # the first boundary comes before the first split
    model = torch.nn.Linear(2, 1)
    sizes = []

    def loss_of(part):
        sizes.append(len(part))
        return model(part).mean()

    asking.run.backward(loss_of, torch.ones(8, 2), model)
    assert sizes == [4, 4]
    assert asking.reply()["answer"]["after"] == {"micro_batch": 4}
    (event,) = asking.run.of("micro_batch_changed")
    assert (event["before"], event["after"], event["training"]) == (8, 4, True)
    asking.ask("halve_batch")
    asking.run.progress(1)
    assert "min_batch_size=4" in asking.reply()["error"]


@pytest.mark.parametrize("has_other", [False, True], ids=["alone", "beside another's hook"])
def test_without_other_hooks_the_optimizer_step_takes_requests(attempt, has_other):
    hooks = _global_optimizer_post_hooks
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with contextlib.ExitStack() as others:
        if has_other:
            others.callback(register_optimizer_step_post_hook(lambda *_: None).remove)
        asking = attempt()
        asking.ask("figures")
        asking.reply()
        optimizer.step()
        assert len(hooks) == has_other, "nothing is hooked in before it is needed"
        asking.ask("explode")
        if has_other:
            optimizer.step()
            assert len(hooks) == 1
            asking.run.progress(1)
        else:
            wait_until(lambda: hooks, "it is hooked in")
            optimizer.step()
        assert "do not support this request" in asking.reply()["error"]
        asking.requests.close(None)
        assert len(hooks) == has_other


def test_a_request_at_the_end_leaves_no_hook(attempt):
    """The thread takes requests until the last checkpoint is written: after the end of training."""
    asking = attempt()
    asking.requests.end(None)
    asking.ask("explode")
    wait_until(lambda: _global_optimizer_post_hooks, "it is hooked in")
    asking.requests.close(None)
    assert not _global_optimizer_post_hooks


def test_no_request_is_carried_out_by_two_threads(asking):
    for _ in range(20):
        asking.ask("explode")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(asking.run.progress, range(8)))
    for number in range(1, 21):
        assert "do not support this request" in asking.reply(number)["error"]
    assert not find_requests(asking.path.parent, TAKEN)


def test_requests_for_others_are_left_alone(attempt):
    """One is for the launcher and one for another rank."""
    asking = attempt(rank=1, world_size=2)
    path = asking.path / "1.json"
    path.write_text('{"verb": "figures"}')
    first = attempt()  # which clears, as a launch does
    path.write_text('{"verb": "stop"}')
    first.ask("figures")
    assert first.reply()["answer"]["attempt_pid"] == os.getpid()
    assert path.exists()


def test_a_signal_within_a_handler_blocks_nothing(tmp_path):
    """For example the launcher's SIGTERM when the attempt has just received its own."""
    run = Run(run_dir=tmp_path)
    interrupted = threading.Event()

    def asks(place):
        """Ask to stop, and ask again after ``place`` lines of the first call."""
        lines = iter(range(place))

        def trace(frame, event, argument):
            if next(lines, None) is not None:
                return trace
            sys.settrace(None)
            interrupted.set()
            return live_of(run).stops.request_stop()

        sys.settrace(trace)
        try:
            live_of(run).stops.request_stop()
        finally:
            sys.settrace(None)

    for place in range(20):
        thread = threading.Thread(target=asks, args=(place,), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), f"stands still after {place} lines"
    assert interrupted.is_set()
    assert run.should_stop()
