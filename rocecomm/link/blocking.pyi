"""Blocking send and receive; nothing for Python."""
