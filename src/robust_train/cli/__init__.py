"""The ``robust-train`` program and the functions of its commands, in the command's process."""
