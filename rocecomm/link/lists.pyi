"""Lists of buffers as one message: the Python side; nothing for users."""

class PieceList:
    """Holds the buffers of a list while they are in flight. Made by the calls themselves."""
