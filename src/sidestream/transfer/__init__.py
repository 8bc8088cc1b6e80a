"""HOW BYTES MOVE between the device and the tiers."""
