"""A library that reads a variable when it is imported."""

import os

VALUE = os.environ.get("READ_AT_IMPORT")


def train(cfg):
    return VALUE
