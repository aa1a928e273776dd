"""Code and command lines of README and the pages: the Python runs as it stands there, every `vitrel` command line parses."""

import contextlib
import functools
import io
import re
import shlex
from itertools import pairwise

import pytest
import timm
import torch
from timm.models import _registry

import vitrel.models  # noqa: F401  registers its models with timm
from helpers import ROOT, each
from vitrel import cli
from vitrel.cli.options import packaged

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name != "founding_documents.md"  # generated, without code
}
NOT_RUN = "# not run"  # first line of a block that needs a file or is a sketch
SWIN = {"depths": (2, 1, 1, 1), "embed_dim": 24}
VIT = {"depth": 1, "embed_dim": 48, "num_heads": 3}
SHALLOW = {"swin_tiny_patch4_window7_224": SWIN, "vitrel_swin_t": SWIN, "vitrel_swinv2_t": SWIN}
SHALLOW |= dict.fromkeys(("vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_small_patch14_dinov2"), VIT)
SHALLOW |= {name: {"depth": 1} for name in ("test_vit", *timm.list_models(["vitrel_vit_n8_*", "vitrel_vit_s16_*"]))}
SHALLOW["vitrel_swin_n"] = {"depths": (2, 1, 1)}
FAST = ("docs/how_to/layer.md", "docs/how_to/large_images.md")
OF_ITS_OWN = "docs/how_to/write_an_encoding.md"  # registers models; tests/models/test_register_position.py runs it


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


WITH_CODE = [
    page for page in PAGES if page != OF_ITS_OWN and any(not block.startswith(NOT_RUN) for block in blocks(page, "python"))
]


def commands(page: str) -> list[list[str]]:
    """The arguments of every `vitrel` command in the page's bash blocks, also behind torchrun, srun and &&."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = [word for part in words for word in (shlex.split(part) if part.startswith("srun ") else [part])]
            starts = [i for i, word in enumerate(words) if word == "vitrel" and (not i or words[i - 1] in ("&&", "-m", "srun"))]
            for start in starts:
                rest = words[start + 1 :]
                found.append(rest[: rest.index("&&")] if "&&" in rest else rest)
    return found


COMMANDS = {shlex.join(argv): argv for page in PAGES for argv in commands(page)}


def small_models(monkeypatch, smaller):
    """Gives timm's models of the names in `smaller` these arguments, and two images to each step that fits an encoding."""
    for name, how in smaller.items():
        entry = functools.partial(timm.model_entrypoint(name), **how)
        monkeypatch.setitem(_registry._model_entrypoints, name, functools.update_wrapper(entry, timm.model_entrypoint(name)))
    monkeypatch.setattr("vitrel.weights.fit._BATCH", 2)


@pytest.mark.parametrize("page", [pytest.param(p, marks=() if p in FAST else pytest.mark.slow) for p in WITH_CODE])
def test_python_runs(page, tmp_path, monkeypatch):
    """All blocks of a page in one namespace, each page on its own, in an empty folder; some models are shallow."""
    small_models(monkeypatch, SHALLOW)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(page, "python"):
        if not block.startswith(NOT_RUN):
            with contextlib.redirect_stdout(io.StringIO()), torch.enable_grad():
                exec(compile(block, page, "exec"), names)


def test_few_blocks_are_not_run():
    left_out = [page for page in PAGES for block in blocks(page, "python") if block.startswith(NOT_RUN)]
    assert len(left_out) <= 3, left_out


@each("line", [line for line, argv in COMMANDS.items() if argv[0] != "train"])
def test_command_lines_parse(line):
    argv = COMMANDS[line]
    assert argv[0] in cli.COMMANDS
    cli.build_parser(argv[:1]).parse_args(argv)


def test_configurations_of_command_lines_come_with_the_package():
    """So that they work from an installed wheel, in any folder; a name with .yaml is a file of the reader's."""
    options = {line: dict(pairwise(argv)) for line, argv in COMMANDS.items()}
    trained = [found["--config"] for found in options.values() if "--config" in found]
    compared = [found["compare"] for found in options.values() if "compare" in found]
    assert len(trained) > 3 and len(compared) > 3 and not any("/" in name for name in (*trained, *compared))
    assert {name for name in trained if not name.endswith(".yaml")} <= packaged("train").keys()
    assert {name for name in compared if not name.endswith(".yaml")} <= packaged().keys()


def test_command_lines_are_found():
    """In README: the quickstart behind &&, and those of its second example."""
    found = [argv[0] for argv in commands("README.md")]
    assert found == ["compare", "train", "train", "evaluate", "predict", "convert", "train"]
    assert any("--trainer.num_nodes=4" in argv for argv in COMMANDS.values())  # behind torchrun, on a continued line
