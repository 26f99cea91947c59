"""Runs the jobs of a sweep (``train.py -m …``), records them, and shows them in a table.

A sweep's process starts one job process for each job. Each job is the same as a job that runs
alone, with its own launcher and run folder.
"""
