"""The border between front ends and an engine, in this process or in its own. Messages carry token ids, not text."""
