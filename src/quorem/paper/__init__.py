"""Sections 2 to 4 of the paper as integers, functions and frozen values: nothing here allocates a table."""
