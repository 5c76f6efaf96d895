"""The words of the pages that users read, and their limits (`make docs` prints them).

    python -m support.words         each page, and the sum

Words are counted as they are read: blocks of code, and signs of markup alone, are none.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST, MOST_TOGETHER = 1500, 18_000


def words(text: str) -> int:
    """Return how many words a page has outside of its blocks of code."""
    prose = re.sub(r"^( *)(```|~~~).*?^\1\2", "", text, flags=re.M | re.S)
    return sum(any(letter.isalnum() for letter in word) for word in prose.split())


def user_pages() -> dict[str, int]:
    """Return the words of each page for users: README, docs, and the trainers'; not the design."""
    patterns = ("README.md", "docs/*.md", "docs/trainers/*.md")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return {path.relative_to(ROOT).as_posix(): words(path.read_text()) for path in paths}


def main() -> None:
    pages = user_pages()
    for name, count in sorted(pages.items(), key=lambda item: item[1]):
        print(f"{count:6,} {name}")
    print(f"{sum(pages.values()):6,} words for users, of {MOST_TOGETHER:,} (a page: {MOST:,})")


if __name__ == "__main__":
    main()
