"""``quorem bench``: compare the fused lookup, training step and DLRM step with other implementations, in one run."""
