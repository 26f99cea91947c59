"""Talking to a live run: its owner's socket, and where what is asked is carried out."""
