"""Datagrams for connecting; nothing for Python."""
