"""List terms that the project no longer uses, with the word to use instead.

    python -m tools.docs.words [PATH ...]

reads docstrings, comments, string literals and names of Python files, prose of Markdown outside of code, and comments of YAML.
Without PATH: every such file that git tracks. Prints FILE:LINE, the term and the word to use. Exit code 1 if a term is found.
"""

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".md", ".yaml", ".yml")
# This table holds the terms, its test plants them.
SKIPPED = ("tools/docs/words.py", "tests/docs/test_words.py")
# Of Python's tokens: f-strings come in pieces from Python 3.12 on, as whole strings before.
_STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
_BETWEEN = {tokenize.NL, tokenize.COMMENT, *(getattr(tokenize, name, tokenize.NL) for name in ("FSTRING_START", "FSTRING_END"))}


class Term(NamedTuple):
    """A regular expression (a space matches a line break too; case is ignored), and the word to use instead."""

    pattern: str
    instead: str


PROSE = (
    Term(r"\b(queries|keys|q and k|pairs|angles) (are |is )?turned\b(?! out)", "rotated"),
    Term(r"\bturned (queries|keys|q and k|pairs|by (the|their|its|these|an?) (angle|position|rotation|frequenc))", "rotated"),
    Term(r"(?<![-\w])blind(?![-\w])", "fully masked"),
    Term(r"\bways? out\b", "the fix, what to do"),
    Term(r"\b(is|are|was|were|been|be) told\b(?! apart| from)|\btold (of|about|in|which|how)\b", "given, reported, described"),
    Term(r"\bwhat [\w' ]{1,25} tells?\b", "name the thing: the metadata, the checkpoint's keys"),
    Term(r"\basked for\b", "requested, chosen, given"),
    Term(r"\bwhat (is|was|were|are|they) asked\b", "the request, the options"),
    Term(r"\b(go|goes|gone|going) on with\b", "resume, continue"),
    Term(r"\bnever met\b", "unseen, not in the training grid"),
    Term(r"\b(does|do|did) not meet\b(?! the)", "do not match; of content: do not multiply"),
    Term(r"\bmet by (queries|keys|values|content)\b|\bmeets? content\b", "multiplied by queries, keys or values"),
    Term(r"\bfor want of\b", "for lack of, because ... is missing"),
    Term(r"\bnone of which\b", "and none of them"),
    Term(r"\b(written|saved|stored|appears?|stays?) whole\b|\bwhole or not at all\b", "atomic, atomically"),
    Term(r"\b(constants|keys and values|log-sum-exp|bias|angles) (is|are|was|were) kept\b", "cached; for backward: saved"),
    Term(r"\b(is|are|was|were|be|when|while) watched\b", "recorded, captured, traced"),
    Term(r"[:;] elsewhere\b", "otherwise; on other devices, at other sizes"),
    Term(r"\baloud\b", "with an error"),
    Term(r"\b(is|are) (not )?to hand\b", "is available"),
    Term(r"\bor (its|their) like\b", "or an equivalent"),
    Term(r"\bnames? of now\b", "the current name"),
    Term(r"\bnames? of theirs\b|\b(models?|terms|file|rotation) of ours\b", "the peer's; vitrel's"),
    Term(r"\bof what (nothing|no|is|was|has|the file|runs|blocks)\b", "name the thing: unused keys, the output of ..."),
    Term(r"\bwhat (nothing|no \w+) (takes?|needs|has|uses|enters|changes|reads)\b", "name the thing: unused keys"),
    Term(r"\bevaluated is not trained\b", "accuracy falls at offsets that were not trained"),
    Term(r"\btransfer report\b", "diagnosis (transfer is transfer learning)"),
    Term(r"(?<!linear )\bprobes?\b", "hook, inspection (a probe is a linear classifier)"),
)

NAMES = (
    Term(r"blind", "fully_masked"),
    Term(r"turned", "rotated, flipped"),
    Term(r"told(?!_apart)", "message, report, error_text"),
    Term(r"asked", "requested, arguments, chosen"),
    Term(r"way_out", "fix"),
    Term(r"watched", "recorded, captured"),
    Term(r"transfers", "diagnosis"),
)


class Passage(NamedTuple):
    """Text that is read in one piece (a docstring, adjacent comments or string literals, a page), and the line it begins in."""

    line: int
    text: str


class Hit(NamedTuple):
    """A term found in a file."""

    line: int
    term: str
    instead: str


def main(arguments: list[str] | None = None) -> int:
    """Print the terms found in the files and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs.words", description=__doc__.split("\n", 1)[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders; without, all that git tracks")
    paths = files(parser.parse_args(arguments).paths)
    found = [(path, hit) for path in paths for hit in hits(path)]
    for path, hit in found:
        print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{hit.line}: {hit.term!r}: {hit.instead}")
    print(f"{len(found)} in {len({path for path, _ in found})} of {len(paths)} files", file=sys.stderr)
    return int(bool(found))


def files(paths: list[Path]) -> list[Path]:
    """Return the Python, Markdown and YAML files at or below `paths`, or all of them that git tracks."""
    if not paths:
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        return [ROOT / name for name in tracked if name.endswith(SUFFIXES) and name not in SKIPPED and (ROOT / name).exists()]
    for path in paths:
        if not path.exists():
            raise SystemExit(f"no such file or folder: {path}")
    found = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in found if file.suffix in SUFFIXES and not file.resolve().as_posix().endswith(SKIPPED)]


def hits(path: Path) -> list[Hit]:
    """Return the terms in a file, in the order of its lines."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        return sorted([*_in_prose(_python(tokens)), *_in_names(tokens)])
    return sorted(_in_prose([_markdown(text)] if path.suffix == ".md" else _yaml(text)))


def _in_prose(passages: list[Passage]) -> Iterator[Hit]:
    for first, text in passages:
        text = re.sub(r"[ \t]*\n[ \t]*", "\n", text)  # an indented line goes on after one character
        line = text.replace("\n", " ")
        for pattern, instead in _PROSE:
            for match in pattern.finditer(line):
                yield Hit(first + text.count("\n", 0, match.start()), match.group(), instead)


def _in_names(tokens: list[tokenize.TokenInfo]) -> Iterator[Hit]:
    """Yield names with a term among their words, each at its first line; names of tests, which are sentences, are left out."""
    first: dict[str, int] = {}
    for token in tokens:
        if token.type == tokenize.NAME:
            first.setdefault(token.string, token.start[0])
    for name, line in first.items():
        if not name.startswith("test_"):
            yield from (Hit(line, name, instead) for pattern, instead in _NAMES if pattern.search(name))


def _python(tokens: list[tokenize.TokenInfo]) -> list[Passage]:
    """Return the strings and comments of a Python file; adjacent ones are joined by line breaks."""
    strings: list[Passage] = []
    comments: list[Passage] = []
    joined = False  # whether the last token was a string
    for token in tokens:
        if token.type == tokenize.COMMENT:
            _append(comments, token.start[0], token.string.lstrip("#! "), joined=True)
        elif token.type in _STRINGS:
            _append(strings, token.start[0], token.string.strip("\"'"), joined=joined)
        joined = token.type in _STRINGS or (joined and token.type in _BETWEEN)
    return strings + comments


def _append(passages: list[Passage], line: int, text: str, joined: bool) -> None:
    """Add `text` to the last passage if it may be joined and goes on in the same or the next line, or as a new one."""
    if passages and joined:
        first, before = passages[-1]
        gap = line - first - before.count("\n")
        if gap in (0, 1):
            passages[-1] = Passage(first, before + "\n" * gap + text)
            return
    passages.append(Passage(line, text))


def _markdown(text: str) -> Passage:
    """Return a page without its code and links' targets; line breaks stay."""
    code = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`|(?<=\()[^()\s]*(?=\))", re.MULTILINE | re.DOTALL)
    return Passage(1, code.sub(lambda match: "`" + "\n" * match.group().count("\n"), text))


def _yaml(text: str) -> list[Passage]:
    """Return the comments of a YAML file."""
    passages: list[Passage] = []
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.search(r"(?:^|\s)#(.*)", line)
        if comment:
            _append(passages, number, comment[1], joined=True)
    return passages


_PROSE = [(re.compile(term.pattern, re.IGNORECASE), term.instead) for term in PROSE]
_NAMES = [(re.compile(rf"(?:^|_)(?:{term.pattern})(?:_|$)"), term.instead) for term in NAMES]


if __name__ == "__main__":
    sys.exit(main())
