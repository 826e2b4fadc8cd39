"""The paper's figures and table, one file each."""
