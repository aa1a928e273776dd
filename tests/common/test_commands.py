"""Printed commands can be pasted into a shell."""

from pathlib import Path

import pytest

from helpers import each, printed_commands
from vitrel.common.commands import command_line, evaluate_line


@pytest.mark.slow
@each(
    ("size", "expected"),
    [((224, 224), [(112, 112), (224, 224), (336, 336), (448, 448)]), ((1, 3), [(1, 2), (1, 3), (2, 4), (2, 6)])],
)
def test_an_evaluation_with_real_values(size, expected):
    folder, data = Path("my runs/it's a"), "data $HOME/a;b"
    [args] = printed_commands(evaluate_line(folder, data, size, folder / "evaluation"))
    assert args.models == [str(folder)] and args.data == data and args.size == expected
    assert args.out == folder / "evaluation"


def test_a_training():
    assert command_line("train", "--data", Path("my shards")) == "vitrel train --data 'my shards'"
