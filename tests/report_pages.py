"""Read the page that the report writes."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Tags with their attributes, the text outside of scripts, and the scripts by id."""

    VOID = frozenset({"meta", "input", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text, self.scripts = "", {}
        self.feed(text)
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[self.tags[-1][1].get("id") or str(len(self.scripts))] = data
        elif self.open[-1:] != ["style"]:
            self.text += data

    def having(self, **wanted):
        return [a for _, a in self.tags if all(w in (a.get(k.rstrip("_")) or "").split() for k, w in wanted.items())]
