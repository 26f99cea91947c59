"""Decides in the launcher what follows a failed attempt: another attempt, or giving up."""
