"""What charts are drawn from: thinned lines, ticks, paths, figures for people."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_train import readable
from robust_train.report.charts import (
    Axis,
    Chart,
    Key,
    byte_ticks,
    number_ticks,
    path,
    step_ticks,
    thinned,
    time_axis,
    time_ticks,
)
from robust_train.report.html import render
from robust_train.sweep.page import SweepStory

MIB = 1024**2
pixels = st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 300)), min_size=1, max_size=300).map(
    lambda points: sorted(points, key=lambda point: point[0])
)


@given(pixels)
def test_a_thinned_line_keeps_its_ends_and_the_extremes_of_every_column(points):
    kept = thinned(points)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    columns = {}
    for x, y in points[1:-1]:
        columns.setdefault(math.floor(x), []).append(y)
    for here, values in columns.items():
        drawn = [y for x, y in kept[1:-1] if math.floor(x) == here]
        assert min(drawn) == min(values)
        assert max(drawn) == max(values)
        assert len(drawn) <= 2


@given(pixels)
def test_a_path_leads_through_all_its_points(points):
    x = y = 0.0
    reached = []
    for index, (a, b) in enumerate(re.findall(r"[Ml](-?[\d.]+),(-?[\d.]+)", path(points))):
        x, y = (float(a), float(b)) if index == 0 else (x + float(a), y + float(b))
        reached.append((x, y))
    for wanted in points:
        assert any(math.dist(wanted, got) < 0.08 for got in reached)


@given(st.floats(0.01, 1e8), st.integers(3, 12))
def test_ticks_lie_on_the_axis_and_are_neither_none_nor_too_many(high, most):
    for ticks in (
        time_ticks(0, high, most),
        byte_ticks(0, high * MIB, most),
        step_ticks(0, high, most),
    ):
        assert 1 <= len(ticks) <= most + 1
        assert min(tick.value for tick in ticks) >= 0
    values = [tick.value for tick in time_ticks(0, high, most)]
    assert max(values) <= high * (1 + 1e-6)
    assert len({tick.text for tick in time_ticks(0, high, most)}) == len(values)


@given(st.floats(1e-6, 1e6), st.floats(31, 1e6))
def test_a_logarithmic_axis_has_two_ticks_or_more(low, ratio):
    high = low * ratio
    ticks = number_ticks(low, high, 5, is_log=True)
    assert len(ticks) >= 2
    assert all(low * 0.999 <= tick.value <= high * 1.001 for tick in ticks)


def test_an_axis_maps_its_ends_and_takes_a_range_without_extent():
    assert Axis(0, 10, (), "").share(5) == 0.5
    assert Axis(1, 100, (), "", is_log=True).share(10) == pytest.approx(0.5)
    assert Axis(3, 3, (), "").share(3) == 0
    assert Axis(0, 10, (), "").percent(11) == 100


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


def test_texts_in_a_chart_cannot_leave_it():
    axis = time_axis(0, 1)
    legend = [Key('"><script>', "</title><script>alert(1)</script>"), Key("c1", "\x00")]
    page = render(
        "sweep.html.j2",
        title="",
        sweep=SweepStory('" onload="alert(1)', "", True, "", {}, ()),
        shares=[],
        rows=[],
        loss=Chart('" onload="alert(1)', axis, axis, [], legend),
        advice=[],
    )
    assert page.count("<script>") == 1, "our own"
    assert 'onload="' not in page
    assert "\x00" not in page
