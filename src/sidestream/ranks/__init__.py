"""Tensor parallelism: one engine on several ranks, each with its share of the model's heads and of the KV.

Rank 0 schedules and owns all bookkeeping; the other ranks follow. They run the same steps, and copy the same blocks,
on their own devices:

    messages   what rank 0 sends: steps, copies, reads and writes of tiers; and what the ranks report
    fences     a fence that is done when every rank has passed it
    leader     rank 0's device and executor, which do everything on all ranks
    follower   another rank: carries messages out on its own device
"""
