"""A message that is spread over several buffers: registrations and copies; nothing for Python."""
