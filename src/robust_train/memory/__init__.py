"""Memory of this process: see it, clear it, limit it, and list what fills it."""
