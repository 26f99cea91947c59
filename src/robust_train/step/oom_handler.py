"""Calls a function again with a smaller batch if memory runs out, without the launcher.

Users call `OOMHandler`, `retry_on_oom` and `adaptive_batch_training` in their own process. The
effective batch size stays the same. The memory of a failed call is released before the next call,
and its gradients are restored. Other failures are raised at once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar, overload

from robust_train.config.signatures import signature_of
from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory.clearing import StartingMemory, has_half_updated, release_memory
from robust_train.memory.tensors import leaves_in
from robust_train.model.errors import AttemptsExhaustedError
from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.policy.sizes import next_smaller
from robust_train.step.gradients import GradientsBefore
from robust_train.step.reachable import STEPS_IN_BACKWARD

log = logging.getLogger("robust_train")

T = TypeVar("T")
_ACCUMULATION = "gradient_accumulation_steps"


class OOMHandler:
    """Finds the batch size at which a function fits into memory, by running it.

    ::

        handler = OOMHandler(initial_batch_size=128, min_batch_size=4)
        result = handler.run(train)  # train(batch_size=…, gradient_accumulation_steps=…)

    or, around your own loop::

        while True:
            handler.start_try(model)
            try:
                train(handler.batch_size, handler.gradient_accumulation_steps)
                break
            except Exception as error:
                if not handler.handle(error):
                    raise

    After a failed try, the variables of its functions are dropped and gradients are restored. If
    more than 1 percent of the memory at the start stays in use, a warning says so.

    Args:
        initial_batch_size: micro-batch size of the first try.
        min_batch_size: the smallest micro-batch size to try.
        gradient_accumulation_steps: accumulation of the first try. It grows as the batch shrinks.
        max_retries: the maximum number of tries after the first. None: no limit.
        preserve_effective_batch_size: False never changes the accumulation.
        batch_argument: the parameter for the batch size of the function passed to `run`.
        check_memory: False skips the comparison with the memory at the start, which takes about
            ten milliseconds here and after each failure.

    Attributes:
        batch_size: micro-batch size to use now.
        gradient_accumulation_steps: accumulation to use now.

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
        self.batch_size = initial_batch_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        # Number of samples in each optimizer step. 0: it may change.
        self._effective = 0
        if preserve_effective_batch_size:
            self._effective = initial_batch_size * gradient_accumulation_steps
        self._least = min_batch_size
        self._max_retries = math.inf if max_retries is None else max_retries
        self._batch_argument = batch_argument
        self._tried: dict[int, str] = {}  # the outcome of each size
        self._gradients = GradientsBefore()
        self._start = StartingMemory() if check_memory else None

    def start_try(self, *trained: Any) -> None:
        """Keep the gradients of ``trained`` (models, or functions that close over them).

        `handle` restores them. Call this before each try of your own loop if gradients add up over
        several tries. Other gradients of a failed try are dropped.
        """
        self._gradients = GradientsBefore()
        self._gradients.begin(trained)

    def handle(self, error: BaseException) -> bool:
        """Handle a failure: release its memory, restore gradients, and make the batch smaller.

        Returns:
            Whether to try again. False if memory did not run out, or if that is unclear and the
            failure happened at every size.

        Raises:
            AttemptsExhaustedError: memory ran out at the smallest batch, or within an optimizer's
                step.
        """
        failure = classify_failure(error)
        if not failure.kind.is_memory:
            return False
        trained = leaves_in(error)
        weights_were_written = self._gradients.weights_were_written
        is_half_updated = has_half_updated(error, weights_were_written=weights_were_written)
        release_memory(error)
        self._restore_gradients(error, trained, is_half_updated=is_half_updated)
        leftover = None if self._start is None else self._start.describe_rest()
        do_without_onednn(failure)
        before = self.batch_size
        self._tried[before] = (
            f"  attempt {len(self._tried) + 1}: micro-batch {before} × accumulation "
            f"{self.gradient_accumulation_steps}: {failure.message}"
        )
        if before <= self._least or len(self._tried) > self._max_retries:
            if failure.evidence.clue == Clue.UNCLEAR:
                return False
            sizes = ", ".join(map(str, self._tried))
            tries = "\n".join(self._tried.values())
            raise AttemptsExhaustedError(
                f"out of memory at every batch size tried ({sizes}):\n{tries}"
            ) from error
        self._shrink(failure)
        if weights_were_written:
            log.warning(
                "the call had changed weights before memory ran out, as optimizer.step() does: "
                "they stay changed, and the next try changes them again"
            )
        if leftover:
            log.warning("%s", leftover)
        return True

    def _restore_gradients(
        self, error: BaseException, trained: list[Any], *, is_half_updated: bool
    ) -> None:
        """Restore the gradients from before a failed call.

        Raises:
            AttemptsExhaustedError: the call cannot be repeated.
        """
        if is_half_updated:
            raise AttemptsExhaustedError(
                "out of memory within optimizer.step(), which may have updated some of the weights "
                "or moments, so the call is not repeated; a smaller batch does not help there: "
                "step after it, or use MicroBatcher.backward"
            ) from error
        if self._gradients.has_optimizer_in_backward:
            raise AttemptsExhaustedError(
                "out of memory in a call that cannot be repeated: an optimizer "
                f"{STEPS_IN_BACKWARD} (register_post_accumulate_grad_hook); step after it"
            ) from error
        if not self._gradients.restore(trained):
            raise AttemptsExhaustedError(
                "out of memory in a call that has added to existing gradients, although earlier "
                "calls had dropped them: drop or keep them in every call, or use "
                "MicroBatcher.backward"
            ) from error

    def _shrink(self, failure: Failure) -> None:
        """Use the next smaller size, and adapt the accumulation."""
        before = self.batch_size
        self.batch_size = next_smaller(before, self._least, self._effective)
        if self._effective:
            self.gradient_accumulation_steps = -(-self._effective // self.batch_size)
        log.warning(
            "out of memory on the %s: micro-batch %d → %d, accumulation %d",
            "host" if failure.kind is FailureKind.HOST_OOM else "GPU",
            before,
            self.batch_size,
            self.gradient_accumulation_steps,
        )

    def run(self, train_fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``train_fn`` until it fits, and return its result.

        The function gets the batch size by keyword if it has a parameter called ``batch_argument``,
        else as its first argument. It gets ``gradient_accumulation_steps`` if it has that
        parameter.

        Raises:
            TypeError: the function is a generator or a coroutine.
            AttemptsExhaustedError: the function does not fit even at ``min_batch_size``.
        """
        _refuse_generators(train_fn, "OOMHandler.run")
        parameters = signature_of(train_fn).parameters
        is_named = self._batch_argument in parameters

        def call() -> T:
            named = {}
            if _ACCUMULATION in parameters:
                named[_ACCUMULATION] = self.gradient_accumulation_steps
            if is_named:
                named[self._batch_argument] = self.batch_size
                return train_fn(*args, **named, **kwargs)
            return train_fn(self.batch_size, *args, **named, **kwargs)

        return self.run_call(call, GradientsBefore(), (train_fn, args, kwargs))

    def run_call(self, call: Callable[[], T], gradients: GradientsBefore, trained: Any) -> T:
        """Run ``call`` until it fits, and return its result.

        Args:
            call: reads the sizes from this handler.
            gradients: records the gradients before each call.
            trained: the modules, functions and arguments whose gradients are recorded.
        """
        self._gradients = gradients
        while True:
            gradients.begin(trained)
            try:
                result = call()
            except Exception as error:
                if not self.handle(error):
                    raise
            else:
                gradients.end()
                return result


def adaptive_batch_training(
    train_fn: Callable[..., T],
    initial_batch_size: int = 128,
    min_batch_size: int = 4,
    *,
    gradient_accumulation_steps: int = 1,
    max_retries: int | None = None,
    batch_argument: str = "batch_size",
) -> T:
    """Call ``train_fn`` with smaller batches until it fits, as `OOMHandler.run` does.

    Args:
        train_fn: called with the batch size, and with the accumulation if it has that parameter.
        initial_batch_size: micro-batch size of the first call.
        min_batch_size: the smallest micro-batch size to try.
        gradient_accumulation_steps: accumulation of the first call. It grows as the batch shrinks.
        max_retries: the maximum number of calls after the first. None: no limit.
        batch_argument: the parameter of ``train_fn`` for the batch size.

    Returns:
        The result of the call that fits.

    Raises:
        TypeError: ``train_fn`` is a generator or a coroutine.
        AttemptsExhaustedError: ``train_fn`` does not fit even at ``min_batch_size``.
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
def retry_on_oom(function: Callable[..., T], /) -> Callable[..., T]: ...
@overload
def retry_on_oom(
    *, max_retries: int = 3, min_batch_size: int = 1, batch_argument: str = "batch_size"
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...
def retry_on_oom(
    function: Callable[..., Any] | None = None,
    /,
    *,
    max_retries: int = 3,
    min_batch_size: int = 1,
    batch_argument: str = "batch_size",
) -> Callable[..., Any]:
    """Decorate a function or method to be called again with half the batch if memory runs out.

    The batch size is the argument called ``batch_argument``. An argument
    ``gradient_accumulation_steps`` is multiplied to match, so that the effective batch stays the
    same. Gradients are restored after a failed call. If the function adds to existing gradients
    instead of dropping them, each call copies them to the host. `MicroBatcher.backward` does not.

    Args:
        max_retries: the maximum number of calls after the first.
        min_batch_size: the smallest batch size to try.
        batch_argument: the parameter of the function for the batch size.

    Returns:
        A decorator. The decorated function returns the result of the call that succeeded.

    Raises:
        TypeError: on decoration, the function is a generator or coroutine or lacks the parameter.
        AttemptsExhaustedError: on a call, memory ran out every time.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        _refuse_generators(function, "retry_on_oom")
        signature = signature_of(function)
        if batch_argument not in signature.parameters:
            raise TypeError(
                f"retry_on_oom: {_name_of(function)} has no parameter {batch_argument!r}; name the "
                "batch with batch_argument=…"
            )
        gradients = GradientsBefore()

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
                check_memory=False,
            )

            def call() -> T:
                bound.arguments[batch_argument] = handler.batch_size
                if accumulation is not None:
                    bound.arguments[_ACCUMULATION] = handler.gradient_accumulation_steps
                return function(*bound.args, **bound.kwargs)

            return handler.run_call(call, gradients, (function, args, kwargs))

        return with_retries

    return decorate if function is None else decorate(function)


def _refuse_generators(function: Callable[..., Any], user: str) -> None:
    """Refuse a generator or coroutine, whose body runs only after the call has returned."""
    kinds: dict[str, Callable[[Any], bool]] = {
        "a generator": inspect.isgeneratorfunction,
        "an async function": inspect.iscoroutinefunction,
        "an async generator": inspect.isasyncgenfunction,
    }
    # A callable object runs its __call__.
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
