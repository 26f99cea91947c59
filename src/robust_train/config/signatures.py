"""Finds the signature with which a callable can really be called.

`attempt.loading` uses it to choose the arguments of a trainer, and `step.oom_handler` to check the
arguments of a training function. Pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from robust_train.compat import signature_as_written

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""The kinds of parameters such as ``*args`` and ``**kwargs``."""


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature with which a callable can really be called.

    `inspect.signature` would return the signature of the function that :func:`functools.wraps`
    names. It is returned here only if the wrapper passes all arguments on (``*args``).

    Raises:
        TypeError, ValueError: the callable has no signature, like some callables in C.
    """
    signature = own_signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    wrapped = _wrapped_by(function)
    if wrapped is None or kinds.isdisjoint(VARIADIC):
        return signature
    return signature_of(wrapped)


def own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable itself, not of the function that it wraps.

    Raises:
        TypeError, ValueError: like :func:`signature_of`.
    """
    bare = _drop_copied_signature(function)
    return signature_as_written(bare, follow_wrapped=False)


def _drop_copied_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable without a ``__signature__`` that ``functools.wraps`` copied."""
    if isinstance(function, partial):
        inner = _drop_copied_signature(function.func)
        return partial(inner, *function.args, **function.keywords)
    if isinstance(function, MethodType):
        return MethodType(_drop_copied_signature(function.__func__), function.__self__)
    copied = getattr(function, "__signature__", None)
    wrapped = getattr(function, "__wrapped__", None)
    if copied is not getattr(wrapped, "__signature__", None):
        return function
    if copied is None or not isinstance(function, FunctionType):
        return function
    bare = FunctionType(
        function.__code__, {}, argdefs=function.__defaults__, closure=function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return bare


def _wrapped_by(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the callable that a callable wraps, bound to the same object and arguments, or
    None."""
    if isinstance(function, partial):
        inner = _wrapped_by(function.func)
        if inner is None:
            return None
        return partial(inner, *function.args, **function.keywords)
    if isinstance(function, MethodType):
        inner = _wrapped_by(function.__func__)
        return None if inner is None else MethodType(inner, function.__self__)
    wrapped: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
    call = getattr(type(function), "__call__", None)  # noqa: B004
    if wrapped is None and isinstance(call, FunctionType):
        return _wrapped_by(MethodType(call, function))
    return wrapped
