"""This machine: processes, signals, cgroups and the terminal. Used by launcher and attempt."""
