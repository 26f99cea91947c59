"""Recovery from out-of-memory errors inside one process, without the launcher.

The same classifier and the same policy as the launcher's: other failures are raised at once, the
effective batch is kept, and memory is really released before the next try.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, overload

from robust_train.errors import AttemptsExhausted
from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory import cleanup
from robust_train.policy.decide import decide, first_attempt
from robust_train.policy.sizes import PolicySettings
from robust_train.values import Attempt, Clue, GiveUp, Outcome

log = logging.getLogger("robust_train")

T = TypeVar("T")
_UNLIMITED = 10**6
_ACCUMULATION = "gradient_accumulation_steps"
_CHECK_SHARE = 0.01
_FIRST_LOOKS = 10


class OOMHandler:
    """Finds the batch size at which a function fits into memory, by running it.

    ::

        handler = OOMHandler(initial_batch_size=128, min_batch_size=4)
        result = handler.run(train)  # train(batch_size=…, gradient_accumulation_steps=…)

    or, around a loop of one's own::

        while True:
            try:
                train(handler.batch_size, handler.gradient_accumulation_steps)
                break
            except Exception as error:
                if not handler.handle(error):
                    raise

    After a failed try its frames are emptied, gradients are as they were before it, and what it
    still holds beyond one percent of the memory at the start is logged with the holders' names.
    "Before it" is when the handler was made or :meth:`run` was called: where gradients add up over
    several calls of a loop of one's own, call :meth:`start_try` before each.

    Args:
        initial_batch_size: micro-batch of the first try.
        min_batch_size: no try uses a smaller one.
        gradient_accumulation_steps: accumulation of the first try; it grows as the batch shrinks.
        max_retries: tries after the first one; None for as many as there are sizes.
        preserve_effective_batch_size: False leaves the accumulation as it is.
        batch_argument: which parameter of a function given to :meth:`run` is the batch.
        check_memory: False skips the comparison with the memory at the start, which takes some ten
            milliseconds here and after each failure.

    Raises:
        ValueError: the sizes are below 1 or in the wrong order.
    """

    def __init__(
        self,
        initial_batch_size: int = 128,
        min_batch_size: int = 4,
        *,
        gradient_accumulation_steps: int = 1,
        max_retries: int | None = None,
        preserve_effective_batch_size: bool = True,
        batch_argument: str = "batch_size",
        check_memory: bool = True,
        _leaves: _Leaves | None = None,
    ) -> None:
        if not 1 <= min_batch_size <= initial_batch_size:
            raise ValueError(
                f"min_batch_size={min_batch_size}: must be from 1 to "
                f"initial_batch_size={initial_batch_size}"
            )
        if gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps={gradient_accumulation_steps}: must be 1 or more"
            )
        self._settings = PolicySettings(
            batch_size=initial_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            min_batch_size=min_batch_size,
            max_retries=_UNLIMITED if max_retries is None else max_retries,
            may_switch_gpu=False,
            allow_cpu_fallback=False,
            preserve_effective_batch_size=preserve_effective_batch_size,
            may_report=False,
        )
        self._batch_argument = batch_argument
        self._spec = first_attempt(self._settings, ())
        self._history: tuple[Attempt, ...] = ()
        self._leaves = _leaves or _Leaves()
        self.start_try()
        # with no gradients of its own: those of the try are restored
        self._start = cleanup.StartingMemory(cleanup.KeptGradients(())) if check_memory else None

    def start_try(self) -> None:
        """Keep the gradients as they are now, for :meth:`handle` to go back to."""
        self._gradients = cleanup.KeptGradients(self._leaves.now())

    @property
    def batch_size(self) -> int:
        """Micro-batch to use now."""
        return self._spec.batch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Accumulation to use now."""
        return self._spec.gradient_accumulation_steps

    def handle(self, error: BaseException) -> bool:
        """Take a failure: release its memory, restore gradients, and make the batch smaller.

        Returns:
            Whether to try again; False for what is not a matter of memory, or is not known to be
            and happened at every size.

        Raises:
            AttemptsExhausted: memory ran out and there is no smaller batch left to try.
        """
        failure = classify_failure(error)
        if not failure.kind.is_memory:
            return False
        left = cleanup.release_and_check(error, self._start, self._gradients)
        do_without_onednn(failure)
        self._history += (Attempt(self._spec, Outcome(failure)),)
        decision = decide(self._settings, self._history, ())
        if isinstance(decision, GiveUp):
            if failure.evidence.clue == Clue.UNCLEAR:
                return False
            raise AttemptsExhausted(self._account()) from error
        for line in (decision.reason, decision.warning, left):
            if line is not None:
                log.warning("%s", line)
        self._spec = decision.spec
        return True

    def run(self, train_fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``train_fn`` until it fits, and return what it returns.

        It gets the batch by keyword if it has a parameter called ``batch_argument``, else as its
        first argument; and ``gradient_accumulation_steps`` if it has that parameter.

        Raises:
            TypeError: it is a generator or a coroutine.
            AttemptsExhausted: it does not fit at ``min_batch_size`` either.
        """
        _must_be_plain(train_fn, "OOMHandler.run")
        parameters = inspect.signature(train_fn).parameters
        is_named = self._batch_argument in parameters
        self.start_try()
        while True:
            sizes = () if is_named else (self.batch_size,)
            named = {self._batch_argument: self.batch_size} if is_named else {}
            if _ACCUMULATION in parameters:
                named[_ACCUMULATION] = self.gradient_accumulation_steps
            try:
                return train_fn(*sizes, *args, **named, **kwargs)
            except Exception as error:
                if not self.handle(error):
                    raise

    def _account(self) -> str:
        """Return every attempt, one a line."""
        tried = ", ".join(str(attempt.spec.batch_size) for attempt in self._history)
        lines = [f"out of memory at every batch size tried ({tried}):"]
        for number, attempt in enumerate(self._history, start=1):
            failure, spec = attempt.outcome.failure, attempt.spec
            assert failure is not None
            lines.append(
                f"  attempt {number}: batch size {spec.batch_size} × accumulation "
                f"{spec.gradient_accumulation_steps}: {failure.message}"
            )
        return "\n".join(lines)


class _Leaves:
    """The tensors that may get gradients, looked for at most one percent of the time. But in each
    of the first tries, since models are made, or completed, just before or in them."""

    def __init__(self) -> None:
        self._looks = 0
        self._found: list[weakref.ref[Any]] = []
        self._next_look = 0.0

    @property
    def is_due(self) -> bool:
        return self._looks < _FIRST_LOOKS or time.monotonic() >= self._next_look

    def now(self) -> list[Any]:
        # those that are made between two looks count as made by the try
        if self.is_due:
            self._looks += 1
            started = time.monotonic()
            self._found = [weakref.ref(tensor) for tensor in cleanup.leaf_tensors()]
            now = time.monotonic()
            self._next_look = now + (now - started) / _CHECK_SHARE
        return [tensor for reference in self._found if (tensor := reference()) is not None]


def adaptive_batch_training(
    train_fn: Callable[..., T],
    initial_batch_size: int = 128,
    min_batch_size: int = 4,
    *,
    gradient_accumulation_steps: int = 1,
    max_retries: int | None = None,
    batch_argument: str = "batch_size",
) -> T:
    """Call ``train_fn`` with smaller batches until it fits; see :class:`OOMHandler`.

    Raises:
        TypeError: ``train_fn`` is a generator or a coroutine.
        AttemptsExhausted: it does not fit at ``min_batch_size`` either.
    """
    handler = OOMHandler(
        initial_batch_size,
        min_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_retries=max_retries,
        batch_argument=batch_argument,
    )
    return handler.run(train_fn)


@overload
def retry_on_oom(max_retries: Callable[..., T]) -> Callable[..., T]: ...
@overload
def retry_on_oom(
    max_retries: int = 3, *, min_batch_size: int = 1, batch_argument: str = "batch_size"
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...
def retry_on_oom(
    max_retries: int | Callable[..., Any] = 3,
    *,
    min_batch_size: int = 1,
    batch_argument: str = "batch_size",
) -> Callable[..., Any]:
    """Decorate a function or method: it is called with half the batch when memory runs out.

    The batch is the argument called ``batch_argument``; an argument ``gradient_accumulation_steps``
    is multiplied to match, so that the effective batch stays the same.

    Args:
        max_retries: calls after the first one; the function itself in ``@retry_on_oom``.
        min_batch_size: no call uses a smaller batch.
        batch_argument: which parameter of the function is the batch.

    Raises:
        TypeError: on decoration, the function is a generator or coroutine or lacks the parameter.
        AttemptsExhausted: on a call, memory ran out every time.
    """

    if callable(max_retries):
        return retry_on_oom()(max_retries)

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        _must_be_plain(function, "retry_on_oom")
        signature = inspect.signature(function)
        if batch_argument not in signature.parameters:
            raise TypeError(
                f"retry_on_oom: {_name_of(function)} has no parameter {batch_argument!r}; name the "
                "batch with batch_argument=…"
            )
        # a function that is called for every batch must not pay for a look each time
        leaves = _Leaves()

        @functools.wraps(function)
        def with_retries(*args: Any, **kwargs: Any) -> T:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            accumulation = bound.arguments.get(_ACCUMULATION)
            batch_size = bound.arguments[batch_argument]
            handler = OOMHandler(
                batch_size,
                min(min_batch_size, batch_size),
                gradient_accumulation_steps=1 if accumulation is None else accumulation,
                max_retries=max_retries,
                check_memory=leaves.is_due,
                _leaves=leaves,
            )
            while True:
                bound.arguments[batch_argument] = handler.batch_size
                if accumulation is not None:
                    bound.arguments[_ACCUMULATION] = handler.gradient_accumulation_steps
                try:
                    return function(*bound.args, **bound.kwargs)
                except Exception as error:
                    if not handler.handle(error):
                        raise

        return with_retries

    return decorate


def _must_be_plain(function: Callable[..., Any], user: str) -> None:
    """Refuse a generator or coroutine, whose body runs after the call: nothing to repeat."""
    kinds: dict[str, Callable[[Any], bool]] = {
        "a generator": inspect.isgeneratorfunction,
        "an async function": inspect.iscoroutinefunction,
        "an async generator": inspect.isasyncgenfunction,
    }
    # an object that is called is what its __call__ is
    called = getattr(type(function), "__call__", None)  # noqa: B004
    for kind, is_kind in kinds.items():
        if is_kind(function) or is_kind(called):
            raise TypeError(
                f"{user}: {_name_of(function)} is {kind}; it must be a plain function, which runs "
                "as a whole when it is called"
            )
    if not callable(function):
        raise TypeError(
            f"{user}: {function!r} cannot be called; under @classmethod or @property the decorator "
            "belongs below them"
        )


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
