"""Golden numbers of each encoding, from the oracles: `python tests/golden/make.py` writes <key>.json, `--check` compares.

Inputs come from one formula, so that any implementation can rebuild them: element m (row-major, from 0) of an array is
round(amplitude * sin(0.37 * (m + 1)^2 + phase), 12), its phase and amplitude in INPUTS.
founding_documents.json is not made here: its values are the documents' own.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import oracles  # noqa: E402

KEYS = ("none", "absolute", "sincos", "table", "factorised", "rope_axial", "rope_mixed")
HEADS, WIDTH = 2, 8
GRIDS = ((2, 3, 0), (3, 2, 2))
TOLERANCE = 1e-10
INPUTS = {  # name: (phase, amplitude)
    "q": (0.1, 1.5),
    "k": (0.7, 1.5),
    "v": (1.3, 1.0),
    "pos_embed": (1.9, 0.5),
    "relative_position_bias_table": (2.5, 0.5),
    "table_h": (3.1, 0.5),
    "table_w": (3.7, 0.5),
    "freqs": (4.3, 1.2),
}


def wave(name, *shape):
    """Input `name` as a float64 array, rounded to 12 digits after the point."""
    phase, amplitude = INPUTS[name]
    values = [round(amplitude * math.sin(0.37 * (m + 1) ** 2 + phase), 12) for m in range(math.prod(shape))]
    return np.array(values).reshape(shape)


def parameters(key, h, w, prefix):
    """The learned arrays of an encoding at a grid, under the names its state dict has."""
    extra = 3 if prefix else 0
    shapes = {
        "absolute": {"pos_embed": (1, prefix + h * w, HEADS * WIDTH)},
        "table": {"relative_position_bias_table": ((2 * h - 1) * (2 * w - 1) + extra, HEADS)},
        "factorised": {"table_h": (2 * h - 1 + extra, HEADS), "table_w": (2 * w - 1, HEADS)},
        "rope_mixed": {"freqs": (2, HEADS, WIDTH // 2)},
    }
    return {name: wave(name, *shape) for name, shape in shapes.get(key, {}).items()}


def case(key, h, w, prefix):
    """One grid: inputs and what the oracle makes of them."""
    q, k, v = (wave(name, HEADS, prefix + h * w, WIDTH) for name in "qkv")
    learned = parameters(key, h, w, prefix)
    logits, output = oracles.ORACLES[key](q, k, v, h, w, prefix, **learned)
    entry = {"grid": {"h": h, "w": w, "prefix": prefix}, "parameters": learned, "q": q, "k": k, "v": v}
    if key == "absolute":
        entry["tokens"] = learned["pos_embed"][0]
    if key == "sincos":
        entry["tokens"] = oracles.sincos_tokens(h, w, prefix, HEADS * WIDTH)
    return entry | {"logits": logits, "output": output}


def document(key):
    """What <key>.json holds, as plain Python values."""
    about = "q, k, v, output [H, N, D]; logits [H, N, N] before softmax, scaled and biased"
    if key in ("absolute", "sincos"):
        about += "; tokens [N, C], split into heads, are added to q, k and v (identity projections of x + tokens)"
    content = {"encoding": key, "about": about, "heads": HEADS, "width": WIDTH, "cases": [case(key, *grid) for grid in GRIDS]}
    return json.loads(json.dumps(content, default=lambda array: np.round(array, 12).tolist()))


def text(content):
    """JSON with one innermost list a line."""
    innermost = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")
    return innermost.sub(lambda found: "[" + " ".join(found[1].split()) + "]", json.dumps(content, indent=1)) + "\n"


def differences(stored, made, path=""):
    """Paths at which two JSON values differ; numbers by more than TOLERANCE."""
    if isinstance(made, float) and isinstance(stored, int | float):
        return [] if abs(stored - made) <= TOLERANCE else [path]
    if type(stored) is not type(made):
        return [path]
    if isinstance(made, dict):
        if stored.keys() != made.keys():
            return [path]
        return [bad for name in made for bad in differences(stored[name], made[name], f"{path}/{name}")]
    if isinstance(made, list):
        if len(stored) != len(made):
            return [path]
        return [bad for i, pair in enumerate(zip(stored, made, strict=True)) for bad in differences(*pair, f"{path}/{i}")]
    return [] if stored == made else [path]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE, help="where the files lie (default: beside this script)")
    parser.add_argument("--check", action="store_true", help="compare with the stored files and write nothing")
    arguments = parser.parse_args()
    wrong = []
    for key in KEYS:
        file, made = arguments.folder / f"{key}.json", document(key)
        if not arguments.check:
            file.write_text(text(made))
        elif not file.exists():
            wrong.append(f"{file}: missing")
        else:
            wrong += [f"{file}: {path}" for path in differences(json.loads(file.read_text()), made)]
    if wrong:
        sys.exit("golden numbers differ from the oracles; rerun without --check if the oracle changed:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
