"""The commands of `python -m proof`: they read options, run what `proof.torture` has, and print it."""
