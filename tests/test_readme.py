"""The README is true: its snippets run, in order, and the files that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_snippets_run() -> None:
    exec("\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)), {})


@pytest.mark.parametrize("page", ("README.md", "benchmarks/README.md"))
def test_links_and_files_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    tree = re.findall(r"\b(?:csrc|rope_ext|tests|benchmarks)/[\w./-]*\w", text)
    missing += [path for path in tree if not (ROOT / path).exists() and "*" not in path]
    assert not missing
