"""GPUs that fail or are taken: evidence of them, and what helps."""
