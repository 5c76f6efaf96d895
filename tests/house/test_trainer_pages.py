"""The pages of docs/trainers: how many lines a diff changes is said where it begins, and counted
here; links lead somewhere."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "trainers").glob("*.md"))
DIFF = re.compile(r"^```diff *([^\n]*)\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_diff_changes_as_many_lines_as_it_says(page):
    for said, body in DIFF.findall(page.read_text()):
        gone, come = (sum(line.startswith(sign) for line in body.splitlines()) for sign in "-+")
        assert said.endswith(f"-{gone} +{come}"), (
            f"{page.name}: a block that begins with ```diff {said}: wanted -{gone} +{come}"
        )


@pytest.mark.parametrize("page", [DOCS / "TRAINERS.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_page_is_in_the_table():
    table = (DOCS / "TRAINERS.md").read_text()
    assert [page.name for page in PAGES if f"(trainers/{page.name})" not in table] == []
