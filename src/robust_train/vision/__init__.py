"""The built-in trainer: image classification on real data sets.

``trainer.py`` tells the story; every other module is named for the one subject it knows. The
launcher never imports this package, and nothing here knows the launcher.
"""
