"""Training whose loss is no longer usable: noticed, undone, repeated."""
