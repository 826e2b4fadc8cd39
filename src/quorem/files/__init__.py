"""What is written to disk: atomic writes, files of tensors, and the provenance recorded in them."""
