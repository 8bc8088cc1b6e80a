"""The records of blocks: which content each block holds, who uses it, and which device work must end before the block
is reused. Holds ids, never a tensor.
"""
