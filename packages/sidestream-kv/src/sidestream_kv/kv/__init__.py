"""The ledger of blocks: which content each block holds, who uses it, and which device work must end before its reuse.
Holds ids, never a tensor.
"""
