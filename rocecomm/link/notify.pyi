"""Notifications; nothing for Python."""
