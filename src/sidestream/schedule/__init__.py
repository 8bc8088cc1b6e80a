"""WHICH REQUESTS RUN NEXT: admission, preemption, chunked prefill, drafts, commit. Pure: no tensors, no clock."""
