"""The progress thread."""
