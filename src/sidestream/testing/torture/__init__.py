"""The real engine on the simulated device, under every kind of trouble, compared with one that does nothing at once."""
