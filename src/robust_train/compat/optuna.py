"""Private names of Optuna, which the sweep's searches use."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def open_trial(study: Any, trial: Any) -> Any:
    """Return a running Optuna trial as an object that can suggest further values."""
    from optuna import Trial

    return Trial(study, trial._trial_id)


def suggest(trial: Any, name: str, space: Any) -> Any:
    """Return an Optuna trial's value for a key. If it has no value, a new value is suggested."""
    return trial._suggest(name, space)


def importances_of(study: Any) -> dict[str, float]:
    """Return how much each parameter of an Optuna study influences the result, as a share.

    Another evaluator of Optuna, which is not used here, would import scikit-learn. That takes
    seconds, so scikit-learn is hidden from the import.
    """
    name = "sklearn"
    is_hidden = name not in sys.modules
    if is_hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
    finally:
        if is_hidden:
            del sys.modules[name]
    # Optuna warns if there are few trials, and about experimental functions.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = PedAnovaImportanceEvaluator()
        return dict(get_param_importances(study, evaluator=evaluator))
