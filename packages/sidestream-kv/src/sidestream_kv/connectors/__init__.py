"""Persistent tiers behind engines that have their own KV offload. `block_store` and `checkpoint` know no engine; the
other modules are the adapter for vLLM, which is imported only by those that vLLM itself imports.
"""
