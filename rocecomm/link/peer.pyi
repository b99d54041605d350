"""One connection: send queue, credits, its end; nothing for Python."""
