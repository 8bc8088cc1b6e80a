"""How a plan becomes device work: inputs, device state, the forward pass, the sampler, the mailbox."""
