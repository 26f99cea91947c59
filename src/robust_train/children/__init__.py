"""Child processes of a launcher or a sweep: interpreters, notifications, itself in the
background."""
