"""Memory of this process: letting go of what a failed try holds, and naming what still holds it."""
