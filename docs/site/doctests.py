"""Examples of docstrings, which begin with ``>>>``, as blocks of code."""

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts fences around the examples before the docstring is taken apart."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of every class, function and module."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with each example, from its first ``>>>`` to the next empty line, in a fence.

    >>> print(fenced("One.\\n\\n>>> 1 + 1\\n2"))
    One.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and line.startswith(">>> "):
            inside = True
            lines.append("```pycon")
        elif inside and not line.strip():
            inside = False
            lines.append("```")
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
