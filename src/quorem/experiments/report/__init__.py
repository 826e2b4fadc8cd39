"""Reports of experiments: one self-contained HTML page, and figures as PNG and PDF, drawn by the same code."""
