"""Read the tables of a page of the console as rows of cells."""

from html.parser import HTMLParser

CELLS = {"td", "th"}


class _Tables(HTMLParser):
    """Collects the rows below each caption, without headings."""

    def __init__(self):
        super().__init__()
        self.found, self._caption, self._into, self._rows = {}, "", None, None

    def handle_starttag(self, tag, _attributes):
        if tag == "caption":
            self._caption, self._into = "", "caption"
        elif tag == "tbody":
            self._rows = self.found[self._caption] = []
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in CELLS and self._rows is not None:
            self._rows[-1].append("")
            self._into = "cell"
        elif self._into == "cell":
            self.handle_data(" ")

    def handle_endtag(self, tag):
        if tag in CELLS | {"caption"}:
            self._into = None
        elif tag == "table":
            self._rows = None

    def handle_data(self, data):
        if self._into == "caption":
            self._caption += data
        elif self._into == "cell":
            self._rows[-1][-1] += data


def read_tables(text):
    """Return the rows of each table of a page by its caption; a row is a list of the texts of its cells."""
    reader = _Tables()
    reader.feed(text)
    return {
        caption: [[" ".join(cell.split()) for cell in row] for row in rows] for caption, rows in reader.found.items()
    }


def read_rows(text, caption=None):
    """Return the rows of the table with that caption, or of all tables."""
    tables = read_tables(text)
    return [row for name, rows in tables.items() for row in rows if caption in {None, name}]
