"""Frozen values that the launcher and attempts share. No module here has effects."""
