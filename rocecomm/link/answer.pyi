"""Answers that need no credit; nothing for Python."""
