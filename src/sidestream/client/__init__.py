"""The interface between front ends and an engine, which runs in the same process or in its own process. Messages
contain token ids, not text.
"""
