"""WHAT RUNS WHEN: streams, fences, memory. Only this room names a torch stream or event."""
