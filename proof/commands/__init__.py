"""The commands of `python -m proof`: they read options, run functions of `proof.torture`, and print the results."""
