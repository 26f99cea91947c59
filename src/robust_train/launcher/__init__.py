"""The launcher: one job from its config to its summary. Never imports torch."""
