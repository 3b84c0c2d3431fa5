"""Bring the pages up to date with docs/results: tables between markers, and figures in docs/images.

python docs/refresh.py
"""

import re
from pathlib import Path

from glocal.report import draw_join, draw_study, draw_theory, study_markdown
from glocal.studies.findings import read_findings

DOCS = Path(__file__).parent


def refreshed(text: str) -> str:
    """A page whose every block from "<!-- findings of NAME -->" to "<!-- end -->" says what docs/results/NAME says."""

    def block(match: re.Match[str]) -> str:
        found = read_findings(DOCS / "results" / match["name"])
        return f"<!-- findings of {match['name']} -->\n\n{study_markdown(found).strip()}\n\n<!-- end -->"

    return re.sub(
        r"<!-- findings of (?P<name>[\w.-]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL
    )


def main() -> None:
    """Rewrite the page and draw the figures."""
    page = DOCS / "reproduction.md"
    page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in re.findall(r"<!-- findings of ([\w.-]+) -->", page.read_text(encoding="utf-8")):
        for path in draw_study(read_findings(DOCS / "results" / name), DOCS / "images"):
            print(f"drawn: {path.relative_to(DOCS)}")
    for path in sorted((DOCS / "results").glob("join-*.json")):
        print(f"drawn: {draw_join(path, DOCS / 'images' / f'{path.stem}.png').relative_to(DOCS)}")
    print(f"drawn: {draw_theory(DOCS / 'images' / 'theory.png').relative_to(DOCS)}")


if __name__ == "__main__":
    main()
