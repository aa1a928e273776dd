"""The tables of docs/performance.md, from the rows of the suites cpu and scale."""

from collections.abc import Callable

from tools.benchmark.models import SETTINGS, visits_of
from tools.benchmark.samples import footer, last_run
from tools.benchmark.scale import DENSE, FLUSHED
from tools.benchmark.tables import Ratio, Row, by_case, call_mb, growth, markdown, ratio, three

PAGE = "docs/performance.md"
_CPU = SETTINGS["cpu"]
MODELS = [model for group in _CPU.groups for model in group]
_ONE, _MANY, _TRAIN, _TRAIN_MANY = range(4)  # of visits_of


class Measured:
    """The rows of models by model, visit and contender."""

    def __init__(self, rows: list[Row]):
        self.cases = by_case(rows)

    def row(self, model: str, visit: int, contender: str) -> Row | None:
        """Return a row, or None if it was not measured."""
        mode = visits_of(model, _CPU)[visit].mode
        found = [of.get(f"{model}: {contender}") for (_, own), of in self.cases.items() if own == mode]
        return next((row for row in found if row), None)

    def ratio(self, fast: tuple[str, str], slow: tuple[str, str], visit: int) -> Ratio | None:
        """Return the speed of one (model, contender) over that of another."""
        rows = self.row(fast[0], visit, fast[1]), self.row(slow[0], visit, slow[1])
        return ratio(rows[1], rows[0]) if rows[0] and rows[1] else None


def tables(models: list[Row], scale: list[Row]) -> list[tuple[str, str]]:
    """Return (name, Markdown) of every table of the page."""
    about, models = last_run(models)
    measured, (_, scale) = Measured(models), last_run(scale)
    found = [("speed", _speeds(measured)), ("resources", _resources(measured)), ("scale", scale_table(scale))]
    return [(name, "\n".join(lines)) for name, lines in [("machine", [f"{footer(about)}."]), *found]]


def _speeds(measured: Measured) -> list[str]:
    ways = (
        ("ours", "timm"), ("ours, compiled", "timm, compiled"), ("ours", "timm, fused attention"), ("ours", "torchvision"),
        ("ours", "transformers"),
    )  # fmt: skip
    plain = MODELS[0]
    head = (
        "",
        "eager / timm",
        "compiled / timm compiled",
        "eager / timm fused",
        "/ torchvision",
        "/ transformers",
        f"/ {plain}",
    )
    body = []
    for model in MODELS:
        for number, visit in enumerate(visits_of(model, _CPU)):
            cells = [_cell(measured.ratio((model, fast), (model, slow), number)) for fast, slow in ways]
            other = measured.ratio((model, "ours"), (plain, "ours"), number) if "ViT" in model and model != plain else None
            body.append([f"{model}, {visit.mode}", *cells, _cell(other)])
    return markdown(head, "|---|" + "---|" * (len(ways) + 1), body)


def _resources(measured: Measured) -> list[str]:
    body = []
    for model in MODELS:
        for visit, larger in ((_ONE, _MANY), (_TRAIN, _TRAIN_MANY)):
            eager = [measured.row(model, visit, name) for name in ("ours", "timm")]
            many = [measured.row(model, larger, name) for name in ("ours", "timm")]
            compiled = [measured.row(model, visit, f"{name}, compiled") for name in ("ours", "timm")]
            if all(eager):
                cells: list[tuple[list[Row | None], Callable[[Row], str]]] = [
                    (eager, lambda row: str(row["launches"])),
                    (eager, lambda row: f"{row['call_bytes'] / 1e6:.0f}"),
                    (many, lambda row: f"{row['call_bytes'] / 1e6:.0f}"),
                    (eager, lambda row: f"{row['first_call_s']:.1f}"),
                ]
                shown = [" / ".join(cell(row) for row in rows if row) for rows, cell in cells]
                first = " / ".join(f"{row['first_call_s']:.0f}" for row in compiled if row) if all(compiled) else ""
                body.append([f"{model}, {visits_of(model, _CPU)[visit].mode}", *shown, first])
    head = (
        "vitrel / timm",
        "operators",
        "MB of a call",
        f"MB, batch {_CPU.batches[1]}",
        "first result, s",
        "first result compiled, s",
    )
    return markdown(head, "|---|" + "---:|" * 5, body)


def scale_table(rows: list[Row]) -> list[str]:
    """Return the table of cost against size: an encoding per line."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row["kind"] == "size":
            found.setdefault(row["contender"], {}).setdefault(row["mode"].partition(",")[0], []).append(row)
    failed = {row["contender"]: row["mode"] for row in rows if row["kind"] == "failed"}
    body = []
    for name, modes in found.items():
        cells = [f"`{name}`" if name not in (DENSE, FLUSHED) else name]
        for mode, tokens in (("inference", (196, 4096, 16384)), ("training", (4096, 16384))):
            own = modes.get(mode, [])
            for count in tokens:
                row = next((row for row in own if row["tokens"] == count), None)
                missing = "failed" if failed.get(name) == f"{mode}, {count} tokens" else ""
                cells.append(f"{three(row['call_ms'])}, {three(call_mb(row))}" if row else missing)
            powers = [growth(own, value) for value in (lambda row: row["call_ms"], call_mb)]
            cells.append(", ".join("" if power is None else f"{power:.2f}" for power in powers))
        body.append(cells)
    head = ("ms, MB", "196", "4096", "16384", "exponents", "training 4096", "16384", "exponents")
    return markdown(head, "|---|" + "---:|" * 7, body)


def _cell(found: Ratio | None) -> str:
    return "" if found is None else f"{found.middle:.2f} ({found.low:.2f} to {found.high:.2f})"
