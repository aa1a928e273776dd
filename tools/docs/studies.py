"""Generate the page with all tables and claims of the study on photographs."""

from tools.study.photographs import DATA, ROOT, study_tables

HEAD = """# Photographs: all tables and claims

Made from results/study; the reading is in [the study](photographs.md). ± is half the 95 % interval. A policy is named where
a model has a choice; "none" resampled means that no value of the model was.
"""


def photographs() -> str:
    """Return Markdown: top-1 against size of every model and policy, and the claims, for both sets of photographs."""
    parts = [f"## {name}\n\n{table}\n" for name, table in study_tables(ROOT / "results" / "study", DATA)]
    return "\n".join([HEAD, *parts])
