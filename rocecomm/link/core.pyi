"""State of one communicator as C structures; nothing for Python."""
