"""libibverbs for Python: one class per verbs object; no policy, no threads."""
