"""Memory over time: whether it is stable, leaks or fragments."""
