"""Adapters around transformers' own models: loading, checking, the attention hook, the demo model."""
