"""Policy for the peers of one communicator: wire-up, messages, credits, requests, progress.

`engine.Engine` is what the layers above use; docs/design/messaging.md explains it.
"""
