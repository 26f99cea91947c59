"""Notifications of a job: by a program of the user's, or by Apprise."""
