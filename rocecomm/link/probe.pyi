"""Probes; nothing for Python."""
