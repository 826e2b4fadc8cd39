"""Training: the configuration of a run, its model, its loop, checkpoints and metrics."""
