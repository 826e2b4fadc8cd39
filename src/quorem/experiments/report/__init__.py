"""Reports of experiments: one self-contained HTML page, and figures as PNG and PDF, drawn by the same code."""

try:
    from .charts import draw
    from .page import page
except ModuleNotFoundError as error:
    if error.name != "matplotlib":
        raise
    raise ModuleNotFoundError('a report needs matplotlib: pip install "quorem[report]"') from error

__all__ = ["page", "draw"]
