"""Memory that ran out: the evidence for it, and what helps."""
