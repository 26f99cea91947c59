"""What fits where, from peaks: pure functions."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from robust_train.planning.fit import (
    LARGEST_BATCH,
    WORKSPACE_BYTES,
    Peak,
    fits,
    largest_batch,
)
from robust_train.values import GIB, MIB

sizes = st.integers(0, 10**9)
slopes = st.integers(1, 10**8)


# two lines that cross between two sizes next to each other
@example(flat=(0, 16303), steep=(20830, 9963), gradients=2, near=2, room=50719)
@example(flat=(0, 5), steep=(7790, 1), gradients=0, near=1, room=10386)
@settings(max_examples=300, deadline=None)
@given(
    flat=st.tuples(sizes, slopes),
    steep=st.tuples(sizes, slopes),
    gradients=st.integers(0, 10**8),
    near=st.integers(1, 512),
    room=st.integers(0, 10**11),
)
def test_the_largest_batch_fits_and_the_next_does_not(
    flat: tuple[int, int], steep: tuple[int, int], gradients: int, near: int, room: int
) -> None:
    """Peaks move: in the optimizer's step with small batches, in the backward pass with large ones;
    and below the configured batch, gradients are there all the time."""
    asked: list[int] = []

    def predict(size: int) -> Peak:
        asked.append(size)
        by_place = max(flat[0] + flat[1] * size, steep[0] + steep[1] * size)
        return Peak(size, size < near, by_place + (gradients if size < near else 0), {})

    def does_fit(peak: Peak) -> bool:
        return peak.tensors_bytes <= room

    found = largest_batch(predict, does_fit, near)
    calls = len(asked)
    assert calls <= 26
    if found is None:
        assert not does_fit(predict(1))
        return
    assert found in asked, "the answer was predicted itself"
    assert does_fit(predict(found))
    assert found == LARGEST_BATCH or not does_fit(predict(found + 1))


def test_four_predictions_are_enough_where_memory_is_affine() -> None:
    asked: list[int] = []

    def predict(size: int) -> Peak:
        asked.append(size)
        return Peak(size, False, 100 * MIB + 7 * MIB * size, {})

    assert largest_batch(predict, lambda peak: peak.tensors_bytes <= 10 * GIB, 64) == 1448
    assert asked == [64, 128, 1448, 1449]


def test_free_memory_has_to_hold_context_and_cache_too() -> None:
    peak = Peak(8, False, 1000 * MIB, {})
    needed = int(1.1 * (1000 * MIB + WORKSPACE_BYTES)) + 512 * MIB
    assert peak.gpu_bytes == needed
    assert fits(peak, needed, 8 * GIB, 0.95)
    assert not fits(peak, needed - 1, 8 * GIB, 0.95)


def test_the_fraction_of_the_gpu_that_a_job_may_take_bounds_its_cache() -> None:
    peak = Peak(8, False, 4 * GIB, {})
    assert fits(peak, 7 * GIB, 8 * GIB, 0.95)
    assert not fits(peak, 7 * GIB, 8 * GIB, 0.5)
