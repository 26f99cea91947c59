"""The features: a folder for each capability, which can be deleted.

A folder's ``launcher.py`` runs in the launcher, ``attempt.py`` in the attempt, ``cli.py`` in a
command. ``model.py`` has values and pure rules for all of them. Features do not import each other.
:mod:`robust_train.assembly` lists them, and :mod:`robust_train.launcher.hooks` defines the places
where they take part.
"""
