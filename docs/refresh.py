"""Redraw the figures of docs/new-clients.md from docs/results.

python docs/refresh.py

The pages and figures of the paper have a script of their own, papers/liang2020/refresh.py.
"""

from pathlib import Path

from glocal.report import draw_join

DOCS = Path(__file__).parent


def main() -> None:
    """Draw one figure for each trial of a new client."""
    for path in sorted((DOCS / "results").glob("join-*.json")):
        picture = draw_join(path, DOCS / "images" / f"{path.stem}.png")
        print(f"drawn: {picture.relative_to(DOCS)}")


if __name__ == "__main__":
    main()
