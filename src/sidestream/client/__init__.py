"""The interface between front ends and an engine. A front end converts between text and token ids; messages to and from
the engine contain token ids only. The engine runs in the front end's process or in its own process.
"""
