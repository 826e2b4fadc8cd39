"""Training: the configuration of a run, its tables, its metrics."""
