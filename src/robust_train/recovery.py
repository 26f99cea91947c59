"""Recovery from out-of-memory errors inside one process, for people without the launcher.

The same classifier and the same policy as the launcher's: what is not a matter of memory is raised
at once, the effective batch is kept, and memory is really let go of before the next try.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from robust_train.execution.inline import release_memory
from robust_train.failures import classify_failure
from robust_train.policy import AttemptsExhausted, PolicySettings, decide, first_attempt
from robust_train.types import MEMORY_FAILURES, Attempt, AttemptSpec, GiveUp, Outcome

log = logging.getLogger("robust_train")

T = TypeVar("T")
_UNLIMITED = 10**6


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

    Args:
        initial_batch_size: micro-batch of the first try.
        min_batch_size: no try uses a smaller one.
        gradient_accumulation_steps: accumulation of the first try; it grows as the batch shrinks.
        max_retries: tries after the first one; None for as many as there are sizes.
        preserve_effective_batch_size: False leaves the accumulation as it is.

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
        )
        self._spec: AttemptSpec = first_attempt(self._settings, gpu=None)
        self._history: tuple[Attempt, ...] = ()

    @property
    def batch_size(self) -> int:
        """Micro-batch to use now."""
        return self._spec.batch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Accumulation to use now."""
        return self._spec.gradient_accumulation_steps

    def handle(self, error: BaseException) -> bool:
        """Take a failure: let go of its memory and make the batch smaller.

        Returns:
            Whether to try again; False for what is not a matter of memory.

        Raises:
            AttemptsExhausted: memory ran out and there is no smaller batch left to try.
        """
        failure = classify_failure(error)
        if failure.kind not in MEMORY_FAILURES:
            return False
        release_memory(error)
        self._history += (Attempt(self._spec, Outcome(failure)),)
        decision = decide(self._settings, self._history, ())
        if isinstance(decision, GiveUp):
            tried = ", ".join(str(attempt.spec.batch_size) for attempt in self._history)
            raise AttemptsExhausted(
                f"out of memory at every batch size tried ({tried}): {failure.message}"
            ) from error
        log.warning("%s", decision.reason)
        if decision.warning is not None:
            log.warning("%s", decision.warning)
        self._spec = decision.spec
        return True

    def run(self, train_fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``train_fn`` until it fits, and return what it returns.

        It gets ``batch_size`` by keyword if it has a parameter of that name, else as its first
        argument; and ``gradient_accumulation_steps`` if it has that parameter.
        """
        parameters = inspect.signature(train_fn).parameters
        while True:
            sizes = (self.batch_size,)
            named: dict[str, Any] = {}
            if "batch_size" in parameters:
                sizes, named = (), {"batch_size": self.batch_size}  # type: ignore[assignment]
            if "gradient_accumulation_steps" in parameters:
                named["gradient_accumulation_steps"] = self.gradient_accumulation_steps
            try:
                return train_fn(*sizes, *args, **named, **kwargs)
            except Exception as error:
                if not self.handle(error):
                    raise


def adaptive_batch_training(
    train_fn: Callable[..., T],
    initial_batch_size: int = 128,
    min_batch_size: int = 4,
    *,
    gradient_accumulation_steps: int = 1,
    max_retries: int | None = None,
) -> T:
    """Call ``train_fn`` with smaller batches until it fits; see :class:`OOMHandler`.

    Raises:
        AttemptsExhausted: it does not fit at ``min_batch_size`` either.
    """
    handler = OOMHandler(
        initial_batch_size,
        min_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_retries=max_retries,
    )
    return handler.run(train_fn)


def retry_on_oom(
    max_retries: int = 3, *, min_batch_size: int = 1, batch_argument: str = "batch_size"
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator: call the function again with half the batch when memory runs out.

    The batch is the argument called ``batch_argument``; an argument ``gradient_accumulation_steps``
    is multiplied to match, so that the effective batch stays the same.

    Args:
        max_retries: calls after the first one.
        min_batch_size: no call uses a smaller batch.
        batch_argument: which parameter of the function is the batch.

    Raises:
        TypeError: on decoration, the function is a generator or coroutine or lacks the parameter.
        AttemptsExhausted: on a call, memory ran out every time.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(function)
        name = getattr(function, "__qualname__", repr(function))
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"retry_on_oom: {name} must be a plain function: it is run as a whole")
        if batch_argument not in signature.parameters:
            raise TypeError(
                f"retry_on_oom: {name} has no parameter {batch_argument!r}; name the batch with "
                "batch_argument=…"
            )

        @functools.wraps(function)
        def with_retries(*args: Any, **kwargs: Any) -> T:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            accumulation = bound.arguments.get("gradient_accumulation_steps")
            batch_size = bound.arguments[batch_argument]
            handler = OOMHandler(
                batch_size,
                min(min_batch_size, batch_size),
                gradient_accumulation_steps=1 if accumulation is None else accumulation,
                max_retries=max_retries,
            )
            while True:
                bound.arguments[batch_argument] = handler.batch_size
                if accumulation is not None:
                    steps = handler.gradient_accumulation_steps
                    bound.arguments["gradient_accumulation_steps"] = steps
                try:
                    return function(*bound.args, **bound.kwargs)
                except Exception as error:
                    if not handler.handle(error):
                        raise

        return with_retries

    return decorate
