"""The user's own rules for what to do after a failure (``retry.rules``)."""
