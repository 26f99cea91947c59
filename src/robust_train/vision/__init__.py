"""The built-in trainer, image classification: a product on top of the library.

``trainer.py`` is the story; of the rest only the configs refer to this package.
What the user can mend is a `ConfigError` of one line, with the key, its value and the way out.
"""
