"""The live lines on a terminal that a job has to itself."""
