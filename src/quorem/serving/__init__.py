"""After training: exported graphs and programs, scoring."""
