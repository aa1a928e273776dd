"""Printed commands can be pasted into a shell."""

from pathlib import Path

import pytest

from helpers import each, printed_commands
from vitrel.common.sizes import Budget
from vitrel.train.running.progress import evaluate_line


@pytest.mark.slow
@each(
    ("trained", "protocols", "expected"),
    [
        ([(224, 224)], [], [(112, 112), (224, 224), (336, 336), (448, 448)]),
        ([(1, 3)], [], [(1, 2), (1, 3), (2, 4), (2, 6)]),
        ([(96, 96), (48, 48), (64, 96)], [], [(24, 24), (48, 48), (64, 96), (96, 96), (144, 144), (192, 192)]),
        ([Budget(196)], ["native"], [Budget(49), Budget(196), Budget(441), Budget(784)]),
        ([Budget(100), Budget(36)], ["native"], [Budget(9), Budget(36), Budget(100), Budget(225), Budget(400)]),
    ],
)
def test_an_evaluation_with_real_values(trained, protocols, expected):
    folder, data = Path("my runs/it's a"), "data $HOME/a;b"
    [args] = printed_commands(evaluate_line(folder, data, trained, folder / "evaluation"))
    assert args.protocols == protocols and args.models == [str(folder)] and args.data == data and args.size == expected
    assert args.out == folder / "evaluation"
