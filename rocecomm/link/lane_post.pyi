"""Posting one-sided requests; nothing for Python."""
