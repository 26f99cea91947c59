"""What a job ran with: environment, command, config files, and what has changed since."""
