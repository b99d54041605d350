"""Completions and repair of a lane; nothing for Python."""
