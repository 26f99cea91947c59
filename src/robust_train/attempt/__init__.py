"""The attempt: the process that runs the trainer."""
