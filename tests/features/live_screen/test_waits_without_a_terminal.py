"""A wait for a GPU, in a job whose output nobody sees as it comes."""

import logging
from dataclasses import replace
from types import SimpleNamespace

from robust_train.features.live_screen.launcher import LiveScreen
from robust_train.queue.waiting import WaitStatus


def test_without_a_terminal_each_look_logs_one_line(caplog):
    status = WaitStatus(60.0, checks=1, obstacles="busy", position=0)
    surroundings = SimpleNamespace(owns_terminal=False)
    screen = LiveScreen(SimpleNamespace(plan=SimpleNamespace(surroundings=surroundings)))
    with caplog.at_level(logging.INFO, "robust_train"):
        for seconds_left, checks in ((60.0, 1), (59.0, 1), (58.0, 2)):
            look = replace(status, seconds_left=seconds_left, checks=checks)
            screen.event(look, None)
    assert [record.message for record in caplog.records] == [
        "waiting for a GPU, 1:00 left: busy",
        "waiting for a GPU, 0:58 left: busy",
    ]
