"""Frozen values that the launcher and an attempt both speak of. No effects."""
