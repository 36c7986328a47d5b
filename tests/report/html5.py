"""Just enough of a parser to ask a page what it says."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

SILENT = {"script", "style", "svg"}
ENCLOSING = ("section", "header")


class Document(HTMLParser):
    """Text by section, and every address of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.images: list[str] = []
        self.addresses: list[str] = []
        self.parts: dict[str, list[str]] = {"": []}
        self.part, self.silent = "", 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.images += [found["src"]] if tag == "img" else []
        self.addresses += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset", "action")
        ]
        self.silent += tag in SILENT
        if tag in ENCLOSING:
            self.part = found.get("id", tag)
            self.parts[self.part] = []

    def handle_endtag(self, tag):
        self.silent -= tag in SILENT
        if tag in ENCLOSING:
            self.part = ""

    def handle_data(self, data):
        if not self.silent:
            self.parts[self.part].append(data)

    def text_of(self, part: str) -> str:
        return re.sub("[ \n]+", " ", "".join(self.parts[part])).strip()

    @property
    def text(self) -> str:
        return "\n".join(self.text_of(part) for part in self.parts)

    @property
    def duplicate_ids(self) -> list[str]:
        return [name for name, count in Counter(self.ids).items() if count > 1]


def parse(page: Path) -> Document:
    document = Document()
    document.feed(page.read_text("utf-8"))
    return document
