"""Experiment trackers go on in one run through all attempts of a job."""
