"""The queue of one-sided requests of one pair of ranks; nothing for Python."""
