"""WHERE KV RESTS besides the device: host memory and disk."""
