"""Which message goes to which receive; nothing for Python."""
