"""Checkpoints that a script writes by itself, found by a pattern."""
