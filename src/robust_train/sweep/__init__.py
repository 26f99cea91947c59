"""Many jobs from one command line: side by side, resumable, and in one table at the end."""
