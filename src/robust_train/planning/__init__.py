"""What a job would need before it starts: predicted memory, the GPUs that have it, earlier runs."""
