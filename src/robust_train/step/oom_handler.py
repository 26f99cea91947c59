"""Recovery from out-of-memory errors inside one process, without the launcher.

It uses the launcher's classifier and sizes. Other failures are raised at once, the effective batch
is kept, and memory is really released before the next try.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar, overload

from robust_train.config.trainers import signature_of
from robust_train.failures import classify_failure
from robust_train.failures.shortage import do_without_onednn
from robust_train.memory.clearing import StartingMemory, has_half_updated, release_memory
from robust_train.memory.tensors import leaves_in
from robust_train.model.errors import AttemptsExhaustedError
from robust_train.model.failure import Clue, FailureKind
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

    After a failed try, its frames are emptied and gradients are restored. If it still holds more
    than 1 percent of the memory at the start, a line is logged.

    Args:
        initial_batch_size: micro-batch of the first try.
        min_batch_size: the smallest micro-batch to try.
        gradient_accumulation_steps: accumulation of the first try. It grows as the batch shrinks.
        max_retries: the number of tries after the first. None: as many as there are sizes.
        preserve_effective_batch_size: False leaves the accumulation as it is.
        batch_argument: the parameter of the function passed to `run` that is the batch.
        check_memory: False skips the comparison with the memory at the start, which takes about
            ten milliseconds here and after each failure.

    Attributes:
        batch_size: micro-batch to use now.
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
        # samples to preserve in an optimizer step, 0 for none
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
        """Take a failure: release its memory, restore gradients, and make the batch smaller.

        Returns:
            Whether to try again. False if the failure is not a lack of memory, or if it is unclear
            and happened at every size.

        Raises:
            AttemptsExhaustedError: memory ran out at the smallest batch, or within an optimizer's
                step.
        """
        failure = classify_failure(error)
        if not failure.kind.is_memory:
            return False
        trained = leaves_in(error)
        writes = self._gradients.weights_were_written
        is_half_updated = has_half_updated(error, weights_were_written=writes)
        release_memory(error)
        if is_half_updated:
            raise AttemptsExhaustedError(
                "out of memory within optimizer.step(), which may have updated some of the weights "
                "or moments, so the call is not repeated; a smaller batch does not help there: "
                "step after it, or use MicroBatcher.backward"
            ) from error
        if self._gradients.weights_have_changed:
            raise AttemptsExhaustedError(
                "out of memory in a call that cannot be repeated: an optimizer "
                f"{STEPS_IN_BACKWARD} (register_post_accumulate_grad_hook); step after it"
            ) from error
        if not self._gradients.restore(trained):
            raise AttemptsExhaustedError(
                "out of memory in a call that has added to the gradients of an earlier one, where "
                "calls before it had dropped what they found: drop or keep them in every call, or "
                "use MicroBatcher.backward"
            ) from error
        left = None if self._start is None else self._start.describe_rest()
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
            raise AttemptsExhaustedError(
                f"out of memory at every batch size tried ({sizes}):\n"
                + "\n".join(self._tried.values())
            ) from error
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
        if writes:
            log.warning(
                "the call had changed weights before memory ran out, as optimizer.step() does: "
                "they stay as they are, and the next try changes them again"
            )
        if left:
            log.warning("%s", left)
        return True

    def run(self, train_fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``train_fn`` until it fits, and return its result.

        It gets the batch by keyword if it has a parameter called ``batch_argument``, else as its
        first argument. It gets ``gradient_accumulation_steps`` if it has that parameter.

        Raises:
            TypeError: it is a generator or a coroutine.
            AttemptsExhaustedError: it does not fit at ``min_batch_size`` either.
        """
        _must_be_plain(train_fn, "OOMHandler.run")
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
        """Call ``call``, which reads the sizes here, until it fits, and return its result.

        ``gradients`` belong to ``trained`` and the modules that it reaches.
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
    """Call ``train_fn`` with smaller batches until it fits, by an `OOMHandler`.

    Args:
        train_fn: called with the batch, and with the accumulation if it has that parameter.
        initial_batch_size: micro-batch of the first call.
        min_batch_size: the smallest micro-batch to try.
        gradient_accumulation_steps: accumulation of the first call. It grows as the batch shrinks.
        max_retries: the number of calls after the first. None: as many as there are sizes.
        batch_argument: the parameter of ``train_fn`` that is the batch.

    Returns:
        The result of the call that fits.

    Raises:
        TypeError: ``train_fn`` is a generator or a coroutine.
        AttemptsExhaustedError: it does not fit at ``min_batch_size`` either.
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
    """Decorate a function or method: it is called with half the batch when memory runs out.

    The batch is the argument called ``batch_argument``. An argument ``gradient_accumulation_steps``
    is multiplied to match, so that the effective batch stays the same. Gradients are restored after
    a failed call. If the function adds to existing gradients instead of dropping them, each call
    copies them to the host. `MicroBatcher.backward` does not.

    Args:
        max_retries: the number of calls after the first.
        min_batch_size: no call uses a smaller batch.
        batch_argument: the parameter of the function that is the batch.

    Returns:
        A decorator. The decorated function returns the result of the call that succeeded.

    Raises:
        TypeError: on decoration, the function is a generator or coroutine or lacks the parameter.
        AttemptsExhaustedError: on a call, memory ran out every time.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        _must_be_plain(function, "retry_on_oom")
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


def _must_be_plain(function: Callable[..., Any], user: str) -> None:
    """Refuse a generator or coroutine: its body runs only after the call that we would repeat."""
    kinds: dict[str, Callable[[Any], bool]] = {
        "a generator": inspect.isgeneratorfunction,
        "an async function": inspect.iscoroutinefunction,
        "an async generator": inspect.isasyncgenfunction,
    }
    # a callable object is judged by its __call__
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
