"""Shipped test kit: fakes, fault injection, oracles."""
