"""The built-in trainer, image classification: a product on top of the library.

``trainer.py`` is the story. Outside this package, only the configs refer to it. A user's mistake
raises a `ConfigError` of one line, with the key, its value and the fix.
"""
