"""Shared by all processes of an engine: how they start and end, talk to each other, write to standard error and collect
garbage. Imports neither torch nor transformers.
"""
