"""How one message travels; nothing for Python."""
