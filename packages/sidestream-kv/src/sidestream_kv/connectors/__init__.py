"""Persistent tiers behind engines that have their own KV offload. `block_store` knows no engine; each other module is
the adapter for one.
"""
