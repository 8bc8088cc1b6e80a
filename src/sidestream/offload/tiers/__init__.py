"""The places of KV besides the device: one module for each tier. `registry` lists them, `stack` holds the open ones."""
