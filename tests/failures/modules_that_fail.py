"""Imported by a test: memory runs out while this module is executed."""

raise MemoryError
