"""The end of a communicator; nothing for Python."""
