"""Access to the machine: processes, signals, cgroups, logging and the terminal.

Launchers, attempts and commands use it.
"""
