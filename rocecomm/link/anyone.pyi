"""Waits for any source, when a peer is gone; nothing for Python in here."""
