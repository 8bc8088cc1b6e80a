"""Sidestream: KV cache that outlives the device pool and the process, moved on side streams."""
