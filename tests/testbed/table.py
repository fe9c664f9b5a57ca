"""A table that is printed line by line, as its rows come."""

from collections.abc import Mapping, Sequence


class Table:
    """Columns by title and width; everything but the first two is right-aligned."""

    def __init__(self, columns: Mapping[str, int]) -> None:
        self.titles = list(columns)
        self.widths = [max(len(title), width) for title, width in columns.items()]

    def header(self) -> None:
        """Prints the titles and a rule."""
        self.row(self.titles)
        print("-" * (sum(self.widths) + 2 * (len(self.widths) - 1)), flush=True)

    def row(self, cells: Sequence[str]) -> None:
        """Prints one row."""
        padded = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, self.widths, strict=True))
        ]
        print("  ".join(padded).rstrip(), flush=True)
