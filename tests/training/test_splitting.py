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
from robust_train.step.splitting import Parts, bounds, join_parts, length_of, part_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    name: str = "a name is not a sample"


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: numpy.ndarray


def batch_of(numbers):
    """Samples that are known by their numbers, in every form that a batch may have."""
    tensor, array = torch.tensor(numbers), numpy.array(numbers)
    texts = [str(number) for number in numbers]
    return {
        "plain": (tensor, array, texts, [[number] * 2 for number in numbers]),
        "sparse": tensor.unsqueeze(1).to_sparse(),
        "wide": tensor.unsqueeze(1).expand(len(numbers), 3),
        "nested": UserDict(pair=Pair({"x": tensor}, (texts, array))),
        "several": [tensor, texts],
        "objects": [tensor, Example(tensor), Slotted(array)],
        "constants": (tensor, None, 3, "text", torch.tensor(2.0)),
    }


@given(st.integers(1, 9), st.integers(1, 10))
def test_the_parts_of_any_batch_are_the_batch(samples, size):
    batch = batch_of(range(samples))
    assert length_of(batch) == samples
    whole, weight = Parts(batch, samples), 0.0
    for start, stop in bounds(samples, size):
        part = whole.part(start, stop)
        assert repr(part.data) == repr(batch_of(range(start, stop)))
        assert type(part.data["nested"]) is UserDict
        assert 1 <= len(part) == stop - start <= size
        weight += part.weight
    assert weight == pytest.approx(1)


@given(st.integers(0, 200), st.integers(1, 50), st.integers(0, 200))
def test_parts_are_few_and_even(samples, at_most, start):
    parts = bounds(samples, at_most, min(start, samples))
    sizes = [stop - first for first, stop in parts]
    left = samples - min(start, samples)
    assert sum(sizes) == left
    assert len(sizes) == -(-left // at_most)
    assert max(sizes, default=0) <= at_most
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert all(part[1] == other[0] for part, other in itertools.pairwise(parts))


def test_tensors_are_not_copied():
    x = torch.zeros(8, 2)
    assert part_of({"x": x}, 2, 4)["x"].data_ptr() == x[2:].data_ptr()


def test_an_encoding_of_transformers_keeps_its_type():
    encoding = pytest.importorskip("transformers").BatchEncoding
    batch = encoding({"input_ids": torch.arange(6).view(3, 2)})
    part = part_of(batch, 1, 3)
    assert isinstance(part, encoding)
    assert part.to("cpu")["input_ids"].tolist() == [[2, 3], [4, 5]]


def test_a_batch_with_uncountable_samples_is_refused():
    """The message has the way out."""
    with pytest.raises(TypeError, match="length=… and split=…"):
        length_of(object())
    with pytest.raises(TypeError, match=r"a PackedSequence: give length=… and split=…"):
        length_of((torch.nn.utils.rnn.pack_sequence([torch.ones(4, 2)]), torch.zeros(4)))
    with pytest.raises(ValueError, match=r"batch\['mask'\] has 1"):
        length_of({"x": torch.zeros(4, 2), "mask": torch.zeros(1, 2)})


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        (torch.ones(1, 2), torch.ones(3, 2), torch.ones(4, 2)),
        (["a"], ["b", "c", "d"], ["a", "b", "c", "d"]),
        ({"mean": 1.0}, {"mean": 5.0}, {"mean": 4.0}),
        (
            Pair(torch.tensor(1.0), "same"),
            Pair(torch.tensor(5.0), ""),
            Pair(torch.tensor(4.0), "same"),
        ),
        ((1, torch.tensor(0)), (3, torch.tensor(2)), (4, torch.tensor(2))),
        ((None, True), (None, True), (None, True)),
    ],
)
def test_results_of_the_parts_are_joined(first, second, whole):
    assert repr(join_parts([first, second], [1, 3])) == repr(whole)


def test_custom_functions_divide_unusual_batches():
    """Such a batch has no first dimension."""
    split = {"split": lambda text, start, stop: text[start:stop]}
    assert MicroBatcher(3).forward(str, "abcdefg", **split) == ["ab", "cd", "efg"]
    shorter = MicroBatcher(3).forward(str, "abcdefg", length=lambda text: 4, **split)
    assert shorter == ["ab", "cd"]
