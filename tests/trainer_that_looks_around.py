"""A user's module that would notice another one's doings."""

import builtins


def train(cfg):
    return hasattr(builtins, "left_by_a_trainer")
