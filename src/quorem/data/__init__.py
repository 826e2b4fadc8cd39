"""Click logs: reading, preparing, making up."""
