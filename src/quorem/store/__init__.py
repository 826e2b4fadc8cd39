"""Files of modules and networks: safetensors with a description, checked and memory-mapped."""
