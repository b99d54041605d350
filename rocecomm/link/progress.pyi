"""Polling, dispatching, waiting; nothing for Python."""
