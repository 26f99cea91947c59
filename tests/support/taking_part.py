"""Features in an attempt of this process."""

import contextlib

from robust_train.attempt.run import live_of
from robust_train.attempt.runner import run_ticks
from robust_train.config.schema import RobustConfig


def hooked(run, feature, config=None):
    """Let one feature take part in a run; return it."""
    live = live_of(run)
    made = feature(live, config or RobustConfig())
    live.take_part([made])
    return made


def guarded(run, **divergence):
    """Let a guard watch the losses of a run; return it."""
    from robust_train.features.divergence.attempt import Guard
    from robust_train.features.divergence.model import DivergenceKeys

    guard = Guard(live_of(run), DivergenceKeys(**divergence))
    live_of(run).watch(guard)
    return guard


@contextlib.contextmanager
def trained(run):
    """Begin and end what takes part, as around a trainer."""
    hooks = live_of(run).hooks
    hooks.begin()
    try:
        with run_ticks(live_of(run)):
            yield
    except BaseException as error:
        hooks.end(error)
        raise
    hooks.end(None)
