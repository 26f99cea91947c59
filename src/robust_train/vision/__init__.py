"""The built-in trainer: image classification on real data sets.

``trainer.py`` is the story; every other module is named for its one subject. A product on top of
the library: nothing but ``planning`` and the configs refer to this package.
"""
