"""What a job would need, before it starts: predicted memory, the GPUs that have it, and what was
measured by earlier runs. The prediction imports torch; nothing else here does."""
