"""Connecting on first use; nothing for Python."""
