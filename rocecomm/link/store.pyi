"""Memory for stored messages; nothing for Python."""
