"""What connecting on first use needs from the start; nothing for Python."""
