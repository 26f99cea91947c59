"""Batches of any structure, divided."""

import itertools
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_train.step.batcher import MicroBatcher
from robust_train.step.splitting import Parts, bounds, length_of, part_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    name: str = "a name is not a sample"


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: numpy.ndarray


def leaves(samples):
    """Things with ``samples`` samples, each known by its number."""
    numbers = list(range(samples))
    return st.sampled_from(
        [
            torch.tensor(numbers),
            torch.tensor(numbers).unsqueeze(1).expand(samples, 3),
            numpy.array(numbers),
            [str(number) for number in numbers],
            [[number] * 2 for number in numbers],
        ]
    )


def nested(samples):
    things = leaves(samples)
    tensors = things.filter(lambda item: isinstance(item, torch.Tensor))
    constants = st.sampled_from([None, 3, "text", torch.tensor(2.0)])
    return st.recursive(
        things,
        lambda inner: st.one_of(
            st.tuples(inner, inner),
            st.tuples(inner, constants),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
            st.builds(Pair, inner, inner),
            st.builds(lambda tensor, item: [tensor, item], tensors, inner),
            st.builds(UserDict, st.dictionaries(st.sampled_from("abc"), inner, min_size=1)),
            st.builds(Example, tensors),
            st.builds(Slotted, things),
        ),
        max_leaves=6,
    )


def joined(parts):
    """The inverse of splitting."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)).tolist() if first.ndim else first.tolist()
    if isinstance(first, numpy.ndarray):
        return numpy.concatenate(parts).tolist()
    if isinstance(first, (dict, UserDict)):
        return type(first), {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return type(first), [joined(items) for items in zip(*parts, strict=True)]
    if isinstance(first, list) and first and isinstance(first[0], torch.Tensor):
        return [joined(items) for items in zip(*parts, strict=True)]
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, Example):
        return Example, joined([part.x for part in parts])
    if isinstance(first, Slotted):
        return Slotted, joined([part.x for part in parts])
    assert all(part is first for part in parts)
    return first


@given(st.data(), st.integers(1, 9), st.integers(1, 10))
def test_the_parts_of_any_batch_are_the_batch(draw, samples, size):
    batch = draw.draw(nested(samples))
    assert length_of(batch) == samples
    whole = Parts(batch, samples)
    parts = [whole.part(start, stop) for start, stop in bounds(samples, size)]
    assert joined([part.data for part in parts]) == joined([batch])
    assert all(1 <= len(part) <= size for part in parts)
    assert sum(part.weight for part in parts) == pytest.approx(1)


@given(st.integers(0, 200), st.integers(1, 50), st.integers(0, 200))
def test_parts_are_as_few_as_may_be_and_even(samples, at_most, start):
    parts = bounds(samples, at_most, min(start, samples))
    sizes = [stop - first for first, stop in parts]
    left = samples - min(start, samples)
    assert sum(sizes) == left
    assert len(sizes) == -(-left // at_most)
    assert max(sizes, default=0) <= at_most
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))


def test_tensors_are_not_copied():
    x = torch.zeros(8, 2)
    assert part_of({"x": x}, 2, 4)["x"].data_ptr() == x[2:].data_ptr()


def test_an_encoding_of_transformers_keeps_its_type():
    encoding = pytest.importorskip("transformers").BatchEncoding
    batch = encoding({"input_ids": torch.arange(6).view(3, 2)})
    part = part_of(batch, 1, 3)
    assert isinstance(part, encoding)
    assert part.to("cpu")["input_ids"].tolist() == [[2, 3], [4, 5]]


def test_a_batch_whose_samples_cannot_be_counted_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match="length=… and split=…"):
        length_of(object())
    with pytest.raises(ValueError, match=r"batch\['mask'\] has 1"):
        length_of({"x": torch.zeros(4, 2), "mask": torch.zeros(1, 2)})


def test_functions_of_ones_own_divide_what_has_no_first_dimension():
    split = {"split": lambda text, start, stop: text[start:stop]}
    assert MicroBatcher(3).forward(str, "abcdefg", **split) == ["ab", "cd", "efg"]
    shorter = MicroBatcher(3).forward(str, "abcdefg", length=lambda text: 4, **split)
    assert shorter == ["ab", "cd"]
