"""The storage levels of KV besides the device, one module for each tier. `registry` lists the known tiers, and `stack`
holds the open tiers of an engine.
"""
