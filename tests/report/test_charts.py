"""The data of charts: figures for people."""

import pytest

from robust_train import readable
from robust_train.report.charts import value_over

MIB = 1024**2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0.0 s"), (0.01, "< 0.1 s"), (3.14, "3.1 s"), (59.6, "1 min"), (185, "3 min 5 s")],
        *[(7800, "2 h 10 min"), (90_000, "1 d 1 h")],
    ],
)
def test_durations_are_told_as_people_say_them(seconds, text):
    assert readable.duration(seconds) == text


def test_other_figures_for_people():
    assert readable.memory(512 * MIB) == "512 MiB"
    assert readable.memory(15.8 * 1024 * MIB) == "15.8 GiB"
    assert [readable.percent(share) for share in (0, 0.001, 0.5, 0.999, 1)] == [
        *("0 %", "< 1 %", "50 %", "> 99 %", "100 %")
    ]
    assert [readable.ordinal(n) for n in (1, 3, 11, 12, 21, 22, 113)] == [
        *("1st", "3rd", "11th", "12th", "21st", "22nd", "113th")
    ]
    assert [readable.number(v) for v in (0, 0.25, 1234, 12345, 6.17e-8, 2e6)] == [
        *("0", "0.25", "1,234", "12,345", "6.17e-8", "2e6")
    ]


def test_charts_space_numbers_by_magnitude():
    """Each text has a place of its own."""
    rates = [("1e-4", 0.5, False), ("1e-2", 0.9, False), ("1e-2", 0.7, False), ("1e-3", 0.2, True)]
    pruned, completed = value_over("Value over lr", rates).plot.lines
    assert (pruned.x, pruned.y, pruned.is_lost) == ([1e-3], [0.2], True)
    assert completed.x == pytest.approx([1e-4, 1e-2, 1e-2], rel=0.01)
    assert len(set(completed.x)) == 3, "a chart has one value at a place"
    assert completed.y == [0.5, 0.9, 0.7]
    assert value_over("", rates).plot.is_log_x
    named = value_over("", [("lora", 0.5, False), ("cnn", 0.9, False)])
    assert named.plot.lines[0].x == [0.0, 1.0]
    assert named.note == "0: cnn, 1: lora. "
    assert not named.plot.is_log_x
    endless = value_over("", [("inf", 0.5, False), ("1.0", 0.9, False), ("inf", 0.7, False)])
    assert endless.note == "0: 1.0, 1: inf. ", "infinity has no place on the axis"
