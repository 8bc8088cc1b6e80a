"""WHO RUNS NEXT: requests, admission, chunking, preemption. Pure: no tensors, no clocks."""
