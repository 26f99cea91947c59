"""Reads the GPUs of this machine, finds out which of them may be used, and chooses among them."""
