"""Write table.md and claims.md of the evaluations in results/ again, from their rows, predictions and configured claims.

python -m tools.study.rejudge            # after a change of vitrel.evaluate.results.advice, claims or statistics
python -m tools.study.rejudge --check    # write nothing; fail if a file is out of date
"""

import argparse
import sys
from pathlib import Path

from tools.study.pages import ROOT
from vitrel.common.plain_yaml import read_yaml
from vitrel.evaluate.results.advice import judge
from vitrel.evaluate.results.aggregate import read_scores
from vitrel.evaluate.results.claims import Claim, judge_claims, read_claim
from vitrel.evaluate.results.table import read_csv, read_translation
from vitrel.evaluate.results.text import table_page

TABLES = {  # titles of table.md
    "quickstart": "quickstart",
    "shapes_classified": "quickstart",
    "imagenette96": "imagenette96",
    "shapes_encodings": "shapes_encodings",
    "study/flowers256": "study_small/flowers256",
    "study/imagenette224": "study_small/imagenette224",
    "study/finetune": "study_finetune",
    "study/finetune_imagenette": "study_finetune",
    "study/imagenet": "study_imagenet",
    "study/imagenet_flowers": "Flowers, linear classifiers",
    "study/imagenet_untrained": "ilsvrc-val",
}
CLAIMS = {
    "study/flowers256": "vitrel/configs/study_small.yaml",
    "study/imagenette224": "vitrel/configs/study_small.yaml",
    "study/imagenet": "vitrel/configs/study_imagenet.yaml",
    "study_shapes/shapes": "vitrel/configs/study_shapes.yaml",
    "study_shapes/shapes-place": "vitrel/configs/study_shapes.yaml",
    "study_shapes/shapes-corner": "vitrel/configs/study_shapes.yaml",
}


def claims_of(config: Path, data: str) -> list[Claim]:
    """Return the claims that a configuration makes on the data set of this name."""
    settings = read_yaml(config)
    items = settings["data"] if isinstance(settings["data"], list) else []
    own = [item["claims"] for item in items if Path(item["data"]).name == data and "claims" in item]
    return [read_claim(item) for item in (own[0] if own else settings["claims"])]


def texts_of(name: str, results: Path, root: Path = ROOT) -> dict[Path, str]:
    """Return {path: text} of the files table.md and claims.md of one evaluation."""
    folder = results / name
    rows, scores, texts = read_csv(folder / "results.csv"), read_scores(folder), {}
    if name in TABLES:
        texts[folder / "table.md"] = table_page(judge(rows, scores), TABLES[name])
    if name in CLAIMS:
        verdicts = judge_claims(claims_of(root / CLAIMS[name], folder.name), rows, read_translation(folder), scores)
        texts[folder / "claims.md"] = "\n".join(verdicts) + "\n"
    return texts


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit with a message and status 1 if a file is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the results")
    args = parser.parse_args(argv)
    for name in dict.fromkeys((*TABLES, *CLAIMS)):
        for path, text in texts_of(name, args.results).items():
            if args.check and path.read_text("utf-8") != text:
                sys.exit(f"{path} is out of date: run python -m tools.study.rejudge")
            if not args.check:
                path.write_text(text, "utf-8")
                print(path)


if __name__ == "__main__":
    main()
