"""THE LOOP: the only room that sees the scheduler, the executor and the transfers together."""
