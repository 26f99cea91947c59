"""Choosing among GPUs, and saying why one does not do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from robust_train.gpu.select import (
    could_ever_fit,
    explain,
    rank,
)
from robust_train.model.gpu import GpuInfo
from robust_train.readable import MIB


def select(gpus: Sequence[GpuInfo], min_bytes: int) -> GpuInfo | None:
    return next(iter(rank(gpus, min_bytes)), None)


def gpu(index: int, free: int, **more: Any) -> GpuInfo:
    values = {
        "uuid": f"GPU-{index:08x}-0000",
        "name": "A100",
        "index": index,
        "pci_bus_id": f"00000000:{index:02x}:00.0",
        "total_bytes": 100,
        "free_bytes": free,
        "used_bytes": 100 - free,
        "utilization_percent": 0,
    }
    return GpuInfo(**{**values, **more})


GPUS = st.lists(
    st.builds(
        gpu,
        st.integers(0, 7),
        st.integers(0, 100),
        utilization_percent=st.none() | st.integers(0, 100),
        unusable=st.none() | st.just("it is ill"),
    ),
    max_size=8,
    unique_by=lambda item: item.index,
)


@given(gpus=GPUS, min_bytes=st.integers(0, 110))
def test_the_choice_is_a_suitable_gpu_that_no_other_one_beats(gpus, min_bytes):
    suitable = [g for g in gpus if g.unusable is None and g.free_bytes >= min_bytes]
    chosen = select(gpus, min_bytes)
    if not suitable:
        assert chosen is None
        return
    assert chosen in suitable
    assert chosen is not None
    assert chosen.free_bytes == max(item.free_bytes for item in suitable)
    assert rank(gpus, min_bytes)[0] == chosen
    assert set(rank(gpus, min_bytes)) == set(suitable)


@given(gpus=GPUS, data=st.data())
def test_the_choice_does_not_depend_on_the_order_of_listing(gpus, data):
    assert select(data.draw(st.permutations(gpus)), 10) == select(gpus, 10)


def test_among_equally_free_gpus_the_least_busy_comes_first_and_unknown_last() -> None:
    busy, idle = gpu(0, 50, utilization_percent=90), gpu(1, 50, utilization_percent=5)
    unknown = gpu(2, 50, utilization_percent=None)
    assert rank([unknown, busy, idle], 10) == [idle, busy, unknown]


def test_among_equal_gpus_the_lowest_pci_address_comes_first() -> None:
    low = gpu(3, 50, pci_bus_id="00000000:0a:00.0")
    high = gpu(1, 50, pci_bus_id="00000001:01:00.0")
    assert select([high, low], 10) == low


def test_a_gpu_that_is_full_now_could_fit_later_and_one_too_small_never() -> None:
    assert could_ever_fit(gpu(0, 0), 100)
    assert not could_ever_fit(gpu(0, 100), 101)
    assert not could_ever_fit(gpu(0, 100, compute_mode="prohibited"), 1)
    assert could_ever_fit(gpu(0, 100, compute_mode="exclusive_process", unusable="owned"), 1)
    assert not could_ever_fit(gpu(0, 0, total_bytes=0, unusable="unreadable"), 0)


def test_the_explanation_names_what_is_needed_and_each_gpus_figures() -> None:
    full = gpu(0, 2200 * MIB, total_bytes=40960 * MIB)
    barred = gpu(1, 5, unusable="compute mode is prohibited")
    assert explain([full, barred], 4000 * MIB) == (
        "needs 4000 MiB free; GPU 0 (A100, GPU-00000000…): 2200 MiB of 40960 MiB free; "
        "GPU 1 (A100, GPU-00000001…): compute mode is prohibited"
    )
