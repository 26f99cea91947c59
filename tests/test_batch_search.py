"""Which sizes a search tries, and what it answers: against machines whose memory is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_train.policy.search import (
    MARGIN,
    MOST_PROBES,
    Limits,
    Probe,
    fits,
    largest_that_fits,
    next_size,
)
from robust_train.policy.sizes import micro_batch_sizes
from robust_train.readable import MIB

# how good an answer is has rare exceptions, where a last probe is spent in vain
same_machines = settings(derandomize=True)


def search(sizes, needs, rest, limit):
    """The answer and the probes of the search; ``needs`` has the bytes for each size."""
    probes = []
    limits = Limits(rest, limit)
    while True:
        size = next_size(sizes, probes, limits)
        if size is None:
            best = largest_that_fits(probes, limits)
            return None if best is None else best.batch_size, probes
        assert len(probes) < MOST_PROBES
        assert size in sizes
        assert size not in [probe.batch_size for probe in probes]
        peak = needs(size)
        probes.append(Probe(size, peak if peak <= limit else None))


def affine(machine):
    rest, workspace, per_sample, _ = machine
    return lambda size: rest + workspace + per_sample * size


def largest_within(sizes, needs, most):
    return max((size for size in sizes if needs(size) <= most), default=None)


@st.composite
def machines(draw):
    """Bytes: at rest, of workspaces, per sample; and the limit, beside which noise is small."""
    rest = draw(st.integers(0, 4000)) * MIB
    workspace = draw(st.integers(0, 500)) * MIB
    per_sample = draw(st.integers(MIB // 4, 200 * MIB))
    limit = rest + workspace + per_sample + draw(st.integers(256, 80_000)) * MIB
    return rest, workspace, per_sample, limit


@same_machines
@given(machines(), st.integers(1, 4096), st.integers(1, 64))
def test_affine_memory_leads_to_the_largest_size(machine, effective, least):
    """Only the margin is left unused."""
    rest, _, _, limit = machine
    sizes, needs = micro_batch_sizes(effective, least), affine(machine)
    answer, _ = search(sizes, needs, rest, limit)
    certain = largest_within(sizes, needs, Limits(rest, limit).but_for(1.5 * MARGIN))
    if certain is not None:
        # a probe for a few percent more is not spent
        assert answer >= certain / (1 + MARGIN)
    if answer is not None:
        assert needs(answer) <= limit


@same_machines
@given(machines(), st.integers(1, 20_000))
def test_at_most_two_margins_are_left_unused(machine, at_most):
    """This holds for all numbers of samples."""
    rest, _, _, limit = machine
    needs = affine(machine)
    answer, _ = search(range(1, at_most + 1), needs, rest, limit)
    if needs(1) <= Limits(rest, limit).but_for(MARGIN):
        # a probe for a few percent more is not spent
        is_almost_all = answer * (1 + MARGIN) >= at_most
        assert is_almost_all or needs(answer + 1) > Limits(rest, limit).but_for(2 * MARGIN)


@given(
    machines(),
    st.integers(1, 2048),
    st.integers(1, 16),
    st.lists(st.floats(-0.3, 0.6), min_size=MOST_PROBES, max_size=MOST_PROBES),
    st.integers(1, 64),
)
def test_a_failed_size_is_never_the_answer(machine, effective, least, noise, granule_mib):
    """It does not matter how memory grows."""
    rest, workspace, per_sample, limit = machine
    wobbling = iter(noise)
    granule = granule_mib * MIB

    def needs(size):
        exact = workspace + per_sample * size * (1 + next(wobbling))
        return rest + -(-int(exact) // granule) * granule

    answer, probes = search(micro_batch_sizes(effective, least), needs, rest, limit)
    assert len(probes) <= MOST_PROBES
    went_through = [probe.batch_size for probe in probes if fits(probe, Limits(rest, limit))]
    assert answer == max(went_through, default=None)


@same_machines
@given(machines(), st.integers(2, 2048))
def test_a_stepwise_allocator_costs_another_margin(machine, effective):
    """It costs no more than that."""
    rest, workspace, per_sample, limit = machine
    sizes = micro_batch_sizes(effective, 1)

    def needs(size):
        return rest + workspace + -(-per_sample * size // (2 * MIB)) * 2 * MIB

    answer, _ = search(sizes, needs, rest, limit)
    certain = largest_within(sizes, needs, Limits(rest, limit).but_for(2 * MARGIN) - 64 * MIB)
    if certain is not None:
        assert answer >= certain


def test_two_probes_are_enough_where_everything_fits():
    needs = affine((80 * MIB, 20 * MIB, 10 * MIB, None))
    answer, probes = search(micro_batch_sizes(64, 4), needs, 80 * MIB, 5000 * MIB)
    assert (answer, [probe.batch_size for probe in probes]) == (64, [4, 64])


@pytest.mark.parametrize(
    ("effective", "least", "sizes"),
    [
        (64, 4, (4, 8, 16, 32, 64)),
        (96, 8, (8, 12, 16, 24, 32, 48, 96)),
        (61, 4, (4, 7, 15, 30, 61)),
        (2, 4, (2,)),
    ],
)
def test_sizes_are_divisors_and_what_halving_leads_to(effective, least, sizes):
    assert micro_batch_sizes(effective, least) == sizes
