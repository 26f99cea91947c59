"""What a launcher or a sweep starts: interpreters, notifications, itself in the background."""
