"""What a framework's trainer logged, as the job's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_train.errors import UserError


def chosen(metric: str | None, logged: Mapping[str, Any]) -> Any:
    """The value of ``metric`` among what was logged last, or all of that where none was named.

    Raises:
        UserError: it was not logged.
    """
    if metric is None:
        return dict(logged)
    if metric not in logged:
        names = ", ".join(sorted(logged)) or "none"
        raise UserError(f"metric={metric}: was not logged; there are {names}")
    return logged[metric]
