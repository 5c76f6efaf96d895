"""Reads a page of ours as a browser would, and holds it to what every page must keep."""

from html.parser import HTMLParser

EVIL = "<script>alert(1)</script>\"'&\x1b[31m"
VOID = {"meta", "br", "link", "input", "img", "hr"}


class Page(HTMLParser):
    """Tags balance, no resource is fetched, and what the reader sees is collected."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.tips, self.tags = [], [], [], []
        self.kept = {"script": [], "style": []}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            inside = name == "href" and value.startswith("#")
            assert inside or not name.startswith(("src", "href", "on", "action")), (tag, name)
            if name == "data-tip":
                self.tips.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.kept.get(self.open[-1] if self.open else "", self.text).append(data)
