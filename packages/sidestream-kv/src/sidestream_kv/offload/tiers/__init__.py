"""The storage levels of KV besides the device, one module for each tier. `stack` lists the known tiers, and holds the
open tiers of an engine.
"""
