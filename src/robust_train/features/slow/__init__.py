"""Training that is slower than it could be: what costs the time, said once."""
