"""The capabilities of robust-train, each in a folder that can be deleted.

A folder's ``launcher.py`` runs in the launcher, ``attempt.py`` in the attempt, and ``cli.py`` in a
command. ``model.py`` has values and pure rules for all of them. Features do not import each other.
:mod:`robust_train.assembly` lists them; :mod:`robust_train.launcher.hooks` says where they take
part.
"""
