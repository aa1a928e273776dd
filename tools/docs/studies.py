"""The page of the study on photographs that holds all its tables and claims."""

from tools.study.photographs import DATA, ROOT, study_tables

HEAD = """# Photographs: all tables and claims

Made from results/study; the reading is in [the study](photographs.md). ± is half the 95 % interval.
In the column "resampled", "nothing" means that no value was resampled, and the name in brackets is the policy of windows.
"""


def photographs() -> str:
    """Markdown: top-1 against size of every model and policy, and the judged claims, for both sets of photographs."""
    parts = [f"## {name}\n\n{table}\n" for name, table in study_tables(ROOT / "results" / "study", DATA)]
    return "\n".join([HEAD, *parts])
