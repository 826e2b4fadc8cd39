"""Files of modules and networks: safetensors with a description and checksums, read as a memory map."""
