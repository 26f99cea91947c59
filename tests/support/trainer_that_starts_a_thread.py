"""Imports a library that starts a native thread, and fails once."""

import starts_a_native_thread


def train(cfg, run):
    if run.attempt == 1:
        raise MemoryError
    return starts_a_native_thread.VALUE
