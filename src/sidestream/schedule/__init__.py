"""WHO RUNS NEXT: requests, admission, chunking, retraction. Pure: no tensors, no clocks."""
