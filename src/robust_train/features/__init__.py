"""What robust-train can do: a folder for each capability, which can be deleted.

A folder's ``launcher.py`` runs in the launcher, ``attempt.py`` in the attempt, ``cli.py`` in a
command; ``model.py`` has values and pure rules for all of them. No feature imports another one.
:mod:`robust_train.assembly` lists them; :mod:`robust_train.launcher.hooks` says where they take
part.
"""
