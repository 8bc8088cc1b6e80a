"""The scheduler: decides which requests run next (admission, preemption, chunked prefill, drafts, commit). Pure: no
tensors, no clock.
"""
