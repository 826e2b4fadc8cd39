"""What the site has beside docs/: the page of the commands, and files elsewhere that documents link to."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:benchmarks|examples)/[^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the commands, and each file outside docs/ that a document links to, under ``files/``."""
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    texts = [file.content_string for file in files.documentation_pages()]
    for name in sorted({name for text in texts for name in OUTSIDE.findall(text)}):
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files outside docs/ lead to their copies; code that the tests do not run is shown as any other."""
    up = "../" * page.file.src_uri.count("/")
    return OUTSIDE.sub(rf"]({up}files/\1)", markdown).replace("```python no-run\n", "```python\n")


def commands() -> str:
    """The help of every command as one page."""
    from quorem.cli import app

    text = ["# Commands\n", "What `quorem COMMAND --help` shows, for every command.\n"]
    for name, command in _commands(typer.main.get_command(app), "quorem"):
        usage = [name, *(parameter.name.upper() for parameter in command.params if _is_argument(parameter))]
        text += [f"## {name}\n", f"`{' '.join(usage)} [OPTIONS]`\n", _escaped(command.help), ""]
        text += ["| | |", "|---|---|", *(_row(parameter) for parameter in command.params), "", command.epilog or "", ""]
    return "\n".join(text)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each command with its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, child in command.commands.items():
        yield from _commands(child, f"{name} {word}")


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _row(parameter: Any) -> str:
    """An argument or option, what it says, and its default."""
    name = parameter.name.upper() if _is_argument(parameter) else ", ".join(parameter.opts)
    choices = get_args(parameter.type_descriptor.annotation)
    words = [_escaped(parameter.help)]
    if choices and all(isinstance(choice, str) for choice in choices):
        words.append("One of " + ", ".join(f"`{choice}`" for choice in choices) + ".")
    if parameter.required:
        words.append("Required.")
    elif parameter.default not in (None, False, ()) and not callable(parameter.default):
        words.append(f"Default: `{parameter.default}`.")
    return f"| `{name}` | {' '.join(words)} |"


def _escaped(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")
