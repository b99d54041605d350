"""How messages of several buffers travel; nothing for Python."""
