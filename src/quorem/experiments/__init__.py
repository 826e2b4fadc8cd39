"""The paper's figures and table, one module each, and the commands that run, plan and report experiments."""
