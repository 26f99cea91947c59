"""The built-in trainer, image classification: a product on top of the library.

``trainer.py`` is the story; of the rest only ``planning`` and the configs refer to this package.
"""
