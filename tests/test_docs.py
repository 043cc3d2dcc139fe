"""The documentation is true: snippets run and print what it says, refusals and figures are real, files are there.

A page runs from top to bottom in one namespace. A `text` block is what the snippet before it prints; a call with an
error beneath it ends in that error. Pages about one file have their tests beside that file's.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accuracy

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"cpp.md", "distributed.md", "models.md"}
DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name not in ELSEWHERE)
PAGES = ["README.md", "benchmarks/README.md", *DOCS]

SNIPPET = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
REFUSAL = re.compile(r"^`([^\n]+)`\n: `([^`]+)`$", re.MULTILINE)
FILE = re.compile(r"\b(?:csrc|rope_ext|tests|benchmarks|docs)/[\w./-]*\w")
LINK = re.compile(r"\]\(([^)#]+)")
FIGURES = re.compile(r"^\| (\d+) \| (\S+) \| (\S+) \|$", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def run_snippets(page: str) -> dict[str, Any]:
    """The namespace of a page after its last snippet."""
    if re.search(r"^from transformers", text_of(page), re.MULTILINE):
        pytest.importorskip("transformers", reason="parity needs the transformers package, a test dependency")
    names: dict[str, Any] = {
        "model": torch.nn.Module()
    }  # the README's reader has one; docs/from-huggingface.md a real one
    printed = io.StringIO()
    for kind, code in SNIPPET.findall(text_of(page)):
        if kind == "text":
            assert printed.getvalue() == code
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if SNIPPET.search(text_of(page))])
def test_snippets_run(page: str) -> None:
    run_snippets(page)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_are_there(page: str) -> None:
    text = text_of(page)
    missing = [
        link for link in LINK.findall(text) if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()
    ]
    missing += [file for file in FILE.findall(text) if not (ROOT / file).exists()]
    assert not missing


def test_refusals_are_the_real_ones() -> None:
    names = run_snippets("docs/operators.md")
    refusals = REFUSAL.findall(text_of("docs/operators.md"))
    assert len(refusals) > 20
    for call, message in refusals:
        with pytest.raises(Exception) as error:
            eval(call, names)
        assert f"{type(error.value).__name__}: {error.value}" == " ".join(message.split()), call


def test_schemas_are_the_registered_ones() -> None:
    names = [stem + end for end in ("", "_") for stem in ("apply", "apply_cos_sin", "rotate", "rotate_cos_sin")]
    registered = [str(getattr(torch.ops.rope, name).default._schema) for name in names]
    assert re.findall(r"^rope::.*$", text_of("docs/operators.md"), re.MULTILINE) == registered


def test_errors_of_tables_are_what_the_page_says() -> None:
    figures = [
        (int(position), float(meta), float(exact))
        for position, meta, exact in FIGURES.findall(text_of("docs/numerics.md"))
    ]
    assert [position for position, *_ in figures] == accuracy.QUOTED
    near = [row for row in figures if row[0] < 2**20]  # up there the table takes a gigabyte
    for column, exact in ((1, False), (2, True)):
        measured = accuracy.errors([row[0] for row in near], exact=exact)
        assert measured == pytest.approx([row[column] for row in near], rel=0.05)
