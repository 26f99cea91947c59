"""Access to private names of Python: the interpreter, multiprocessing, signatures and logging."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import multiprocessing.process
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


def base_executable() -> str:
    """Return the interpreter from which the virtual environment was created.

    Its path does not depend on the project.
    """
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def interpreter_options() -> list[str]:
    """Return this interpreter's options (-O, -W, -X …), as multiprocessing passes them on."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return options


def run_exit_handlers() -> None:
    """Do what an interpreter does at a normal exit, for a process that ends with ``os._exit``.

    Wait for threads that are not daemons, then call the functions registered with ``atexit``.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def is_importing_main() -> bool:
    """Return whether this process is importing another process's script.

    This is so in a process that :mod:`multiprocessing` spawns, and within :func:`importing_main`.
    """
    process = multiprocessing.process.current_process()
    return getattr(process, "_inheriting", False)


@contextlib.contextmanager
def importing_main() -> Iterator[None]:
    """Mark the block as the import of another process's script, as :mod:`multiprocessing` does.

    Within the block, multiprocessing refuses to start a process. That process would import the
    script again, and so start processes without end.
    """
    process: Any = multiprocessing.process.current_process()
    process._inheriting = True
    try:
        yield
    finally:
        del process._inheriting


def signature_as_written(
    function: Callable[..., Any], *, follow_wrapped: bool = True
) -> inspect.Signature:
    """Return a callable's signature with annotations as text.

    Otherwise Python 3.14 would evaluate the annotations, and fail for a name that is imported only
    for type checkers.

    Raises:
        TypeError, ValueError: it has no signature, like some callables in C.
    """
    options: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        options["annotation_format"] = Format.STRING
    return inspect.signature(function, follow_wrapped=follow_wrapped, **options)


def format_of(handler: logging.Handler) -> str | None:
    """Return the format of a handler's lines, or None if it is the default."""
    return getattr(handler.formatter, "_fmt", None)
