"""Local training of many clients at once: batches, the stacked forward pass, steps, recorded programs, Work."""
