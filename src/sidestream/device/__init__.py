"""Devices: streams, fences, memory. Only this room uses torch's streams and events."""
