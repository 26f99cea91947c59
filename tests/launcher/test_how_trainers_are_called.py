"""Which arguments a trainer is called with: its own signature says so, whatever it wraps."""

import __future__

import functools
import inspect
import sys

import pytest

from robust_train.attempt.loading import call_with_run
from robust_train.step.oom_handler import OOMHandler, retry_on_oom

CFG, RUN = "cfg", "run"


def main(cfg, run):
    return cfg, run


def with_default(cfg, run=None):
    return cfg, run


def positional_only(cfg, run, /):
    return cfg, run


def keyword_only(cfg, *, run):
    return cfg, run


def any_name(conf, state):
    return conf, state


def only_the_config(run):
    return (run,)


def defaulted(cfg, verbose=False, *, depth=3):
    return cfg, verbose, depth


def collects(cfg, *run):
    return cfg, *run


def passes_all(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def passes_positions(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def passes_the_config(function):
    @functools.wraps(function)
    def inner(conf):
        return function(conf, None)

    return inner


class Method:
    def train(self, cfg, run, /):
        return cfg, run

    @passes_all
    def wrapped(self, cfg, run):
        return cfg, run

    @passes_all
    def __call__(self, cfg, run):
        return cfg, run


class Decorator:
    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.__wrapped__(*args, **kwargs)


def bound_first(extra, cfg, run):
    assert extra == 1
    return cfg, run


def with_annotations_for_type_checkers():
    """A name that is imported under ``TYPE_CHECKING``: Python 3.14 does not miss it either."""
    flags = 0 if sys.version_info >= (3, 14) else __future__.annotations.compiler_flag
    source = "def train(cfg: DictConfig, run: Run): return cfg, run"
    names = {}
    exec(compile(source, "train.py", "exec", flags=flags), names)
    return names["train"]


BOTH = [
    main,
    with_annotations_for_type_checkers(),
    with_default,
    positional_only,
    keyword_only,
    any_name,
    passes_all(main),
    passes_all(passes_all(keyword_only)),
    passes_all(positional_only),
    passes_positions(main),
    Method().train,
    Method().wrapped,
    Method(),
    Decorator(main),
    functools.partial(bound_first, 1),
    functools.partial(passes_all(bound_first), 1),
]
THE_CONFIG = [
    (only_the_config, (CFG,)),
    (defaulted, (CFG, False, 3)),
    (collects, (CFG,)),
    (passes_the_config(main), (CFG, None)),
    (passes_all(passes_the_config(main)), (CFG, None)),
    (passes_the_config(passes_all(main)), (CFG, None)),
    (passes_all(only_the_config), (CFG,)),
]


@pytest.mark.parametrize("trainer", BOTH)
def test_who_can_take_the_run_gets_it(trainer):
    assert call_with_run(trainer, CFG, RUN) == (CFG, RUN)


@pytest.mark.parametrize(("trainer", "expected"), THE_CONFIG)
def test_a_wrapper_of_the_config_gets_no_run(trainer, expected):
    assert call_with_run(trainer, CFG, RUN) == expected


def test_a_signature_that_wraps_has_copied_says_nothing():
    def given(*args, **kwargs):
        return main(*args, **kwargs)

    given.__signature__ = inspect.signature(main)
    assert call_with_run(given, CFG, RUN) == (CFG, RUN)
    assert call_with_run(passes_the_config(given), CFG, RUN) == (CFG, None)


def test_the_outermost_function_provides_the_batch_argument():
    def at_least(function):
        @functools.wraps(function)
        def inner(size):
            return function(batch_size=size, scale=2)

        return inner

    def train(batch_size, scale):
        return batch_size * scale

    assert OOMHandler(8, check_memory=False).run(at_least(train)) == 16
    assert retry_on_oom(batch_argument="size")(at_least(train))(8) == 16
