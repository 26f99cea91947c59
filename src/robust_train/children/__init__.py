"""Child processes of a launcher or a sweep: interpreters, notifications, and the same command in
the background."""
