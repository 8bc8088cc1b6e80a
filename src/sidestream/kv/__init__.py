"""The ledger of blocks: content, users and fences of each block. Ids and fences, never a tensor."""
