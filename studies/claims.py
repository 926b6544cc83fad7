"""Writes the claims of publications and what models give: docs/claims.md and results/claims.json.

Everything is predicted. ``--check`` writes nothing, and fails if the page or the file of results is
not what the models give now. `make claims` calls this program.
"""

import argparse
import json
import sys
from pathlib import Path

from papers import table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "claims.md"
RESULTS = HERE / "results" / "claims.json"
BEGIN, END = "<!-- begin: make claims -->\n", "<!-- end: make claims -->\n"


def written() -> dict[Path, str]:
    """Returns what the page and the file of results must hold."""
    found = table.records()
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    page = f"{before}{BEGIN}\n{table.markdown(found)}\n\n{END}{after}"
    return {PAGE: page, RESULTS: json.dumps(found, indent=1, ensure_ascii=False) + "\n"}


def main() -> int:
    """Writes or checks both files, and prints the verdicts. Returns 0 unless a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    texts = written()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if check:
        for path in stale:
            print(f"{path} is not what the models give: make claims", file=sys.stderr)
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text)
    for each in json.loads(texts[RESULTS]):
        print(
            f"{each['key']:<28} {each['claimed']!s:<16} {each['predicted']!s:<18} {each['verdict']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
