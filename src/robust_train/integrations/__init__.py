"""Trainers of other frameworks under the launcher: Lightning, transformers, accelerate.

Each module imports its framework when it is imported itself. Other modules of robust-train do not.
"""
