"""What a job would need, before it starts: predicted memory, the GPUs that have it, and what earlier
runs have measured. The prediction imports torch; nothing else here does."""
