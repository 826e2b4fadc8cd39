"""The modules that hold tables: storage, lookup, and what users construct."""
