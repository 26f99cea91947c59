"""``trainer=command``: a script in any language or framework as the trainer."""
