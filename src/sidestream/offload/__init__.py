"""Keeps KV outside the device: `connector` runs on the engine thread, `worker` on its own thread, and `tiers` are the
storage levels.

Imports nothing, so that a process without torch can read the names of the tiers from `tiers.registry`.
"""
