"""The capabilities of robust-train, each in a folder that can be deleted.

A folder's ``launcher.py`` runs in the launcher, and its ``attempt.py`` in the attempt. Both use
``model.py`` for keys and pure rules, and ``record.py`` for the feature's fields in the records.
Features do not import each other. :mod:`robust_train.assembly` lists them, and calls no other part
of them. Their classes implement the hooks in :mod:`robust_train.launcher.hooks` and
:mod:`robust_train.attempt.hooks`.
"""
