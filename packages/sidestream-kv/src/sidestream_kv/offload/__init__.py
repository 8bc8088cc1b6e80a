"""Offloads KV blocks from the device to host memory and disk. `connector` runs on the engine thread, `worker` runs on
its own thread, and `tiers` are the storage levels.

This `__init__` imports nothing, so that a process without torch can read the names of the tiers from `tiers.stack`.
"""
