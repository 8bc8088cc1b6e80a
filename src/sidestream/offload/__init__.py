"""KV beside the device: `connector` on the engine thread, `worker` on its own thread, `tiers` for the places.

Imports nothing, so that a process without torch can ask `tiers.registry` for the names of the tiers.
"""
