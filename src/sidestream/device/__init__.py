"""Devices: streams, fences, memory. Only this package uses torch's streams and events."""
