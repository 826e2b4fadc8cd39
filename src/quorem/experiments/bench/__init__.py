"""``quorem bench``: the fused lookup, training step and DLRM step against other ways to do the same, in one run."""
