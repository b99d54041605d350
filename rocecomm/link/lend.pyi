"""Lends receive slots to those who send; nothing for Python."""
