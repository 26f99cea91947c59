"""The machine's GPUs: what there is, what we may use, which to take."""
