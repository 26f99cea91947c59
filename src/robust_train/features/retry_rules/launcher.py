"""Applies the user's rules in the launcher, before any remedy."""

from __future__ import annotations

from robust_train.features.retry_rules.model import decide_by_rule, with_rule
from robust_train.launcher.hooks import History, InLauncher
from robust_train.model.attempt import Attempt
from robust_train.model.spec import Decision


class RetryRules(InLauncher):
    """Finds the user's rule for each failure, and follows it."""

    def evidence(self, attempt: Attempt, history: History) -> Attempt:
        """Return the attempt with the number of the rule that applies.

        No rule applies to an attempt that was stopped.
        """
        if not self.job.driver.has_remedies or self.job.was_stopped(attempt):
            return attempt
        return with_rule(self.job.policy, tuple(history), attempt)

    def overrule(self, history: History) -> Decision | None:
        """Return the rule's decision, or None if no rule applies."""
        return decide_by_rule(self.job.policy, tuple(history))
