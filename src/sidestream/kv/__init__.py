"""THE LEDGER: which block holds what, who uses it, and since which fence. Ids and fences, never a tensor."""
