"""A table that is printed line by line, as its rows come."""

from collections.abc import Sequence


class Table:
    """Columns as wide as their titles or the widths given; everything but the first two is right-aligned."""

    def __init__(self, titles: Sequence[str], width: int = 10) -> None:
        self.titles = titles
        self.widths = [max(len(title), width if index else 4) for index, title in enumerate(titles)]

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
