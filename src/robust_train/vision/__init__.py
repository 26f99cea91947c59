"""The built-in trainer, which trains image classifiers (``trainer=image_classification``).

It uses the library like any trainer function of a user, and runs in the attempt's process. Start
reading at ``trainer.py``. No module of the library imports this package. Only the configs refer to
it. A mistake in the config raises a `ConfigError` with the key, its value and the fix.
"""
