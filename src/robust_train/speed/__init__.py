"""How fast attempts train, what holds them up, and what to do about it."""
