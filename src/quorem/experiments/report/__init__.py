"""Reports of experiments: one self-contained HTML page, and the paper's figures as PNG and PDF."""

try:
    from .document import page
    from .paper import draw
except ModuleNotFoundError as error:
    if error.name not in ("plotly", "matplotlib"):
        raise
    raise ModuleNotFoundError('a report needs plotly and matplotlib: pip install "quorem[report]"') from error

__all__ = ["page", "draw"]
