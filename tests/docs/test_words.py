"""tools/docs/words.py finds terms in prose and names, with their lines, and leaves ordinary English and code alone."""

import pytest

from tools.docs.words import hits, main

PYTHON = '''"""A fine first line.

Queries that see nothing are blind, and the way
    out is below.
"""

# nothing is
# told of this
turned_q = 1
error = ("for want "
         "of memory")
"""Tell them apart: they are told apart by a blind-free test of what happens."""
plain = turned_q


def test_what_is_told(told_apart):
    pass
'''
MARKDOWN = "# Page\n\nMade for want of memory, `for want of code`.\n\n```\nblind\n```\n\nThe way\nout.\n"
YAML = "key: the way out\nother: 1  # written whole\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", PYTHON, [(3, "blind"), (3, "way out"), (7, "is told"), (9, "turned_q"), (10, "for want of")]),
        ("a.md", MARKDOWN, [(3, "for want of"), (9, "way out")]),
        ("a.yaml", YAML, [(2, "written whole")]),
    ],
)
def test_planted_terms_are_found_with_their_lines(name, text, expected, tmp_path, capsys):
    (tmp_path / name).write_text(text, "utf-8")
    assert [(hit.line, hit.term) for hit in hits(tmp_path / name)] == expected
    assert main([str(tmp_path)]) == 1
    assert f"{name}:{expected[0][0]}: '{expected[0][1]}': " in capsys.readouterr().out


def test_plain_text_passes_and_a_missing_path_is_an_error(tmp_path):
    (tmp_path / "a.md").write_text("Queries and keys are rotated; windows turned out to be whole grids.\n", "utf-8")
    assert main([str(tmp_path)]) == 0
    with pytest.raises(SystemExit, match="no such file"):
        main([str(tmp_path / "b.md")])


@pytest.mark.slow
def test_no_file_of_the_project_has_such_terms(capsys):
    assert main([]) == 0, capsys.readouterr().out
