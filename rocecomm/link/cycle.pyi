"""Two ranks that block in large sends to each other; nothing for Python."""
