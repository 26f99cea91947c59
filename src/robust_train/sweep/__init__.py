"""Many jobs from a single command line: side by side, resumable, and in a table at the end."""
