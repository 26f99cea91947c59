"""Describes jobs from their run folders: the report page, the live status, the last log lines."""
