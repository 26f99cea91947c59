"""Runs Lightning, transformers and accelerate training as attempts of a job.

Trainer functions import these modules in the attempt's process. Importing one of them imports its
framework, so no other module of robust-train imports them at its top.
"""
