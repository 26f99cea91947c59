"""Disks that are full, read-only or broken: evidence of them, and a wait for space."""
