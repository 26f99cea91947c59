"""A user's module that seeds and changes defaults when it is imported."""

import builtins

import numpy

numpy.random.seed(0)
builtins.left_by_a_trainer = True


def train(cfg):
    return float(numpy.random.random())
