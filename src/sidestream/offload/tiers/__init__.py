"""The storage levels of KV besides the device, one module for each tier. `registry` lists the tiers, and `stack` holds
the open ones.
"""
