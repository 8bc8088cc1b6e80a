"""HOW A PLAN BECOMES DEVICE WORK: inputs, device state, the forward pass, sampling, the mailbox."""
