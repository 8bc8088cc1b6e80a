"""Devices: streams, fences (positions on streams) and memory. Only this package uses torch's streams and events."""
