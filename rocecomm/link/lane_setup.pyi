"""Making and connecting lanes; nothing for Python."""
