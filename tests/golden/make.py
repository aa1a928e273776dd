"""Golden numbers of each encoding, from the oracles: `python tests/golden/make.py` writes <key>.json, `--check` compares.

Inputs come from one formula, so that any implementation can rebuild them: element m (row-major, from 0) of an array is
round(amplitude * sin(0.37 * (m + 1)^2 + phase), 4), its phase and amplitude in INPUTS. "trained" is the grid (h, w) that the
encoding was built for, "grid" the one it is evaluated at; an infinite logit is the string "-inf".
founding_documents.json is not made here, its values are the documents' own.
"""

import argparse
import inspect
import json
import math
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import oracles  # noqa: E402

HEADS, WIDTH = 2, 8
SIZES = {"lookhere": (12, 2), "xpos": (4, 8)}  # heads and width where every direction takes more of them
GRIDS = ((2, 3, 0), (3, 2, 2))
TRAINED = (2, 3)
LARGER, OTHER = (5, 4, 1), (4, 2, 1)  # grids (h, w, prefix) for an encoding built for TRAINED
LARGER_OF_MANY_HEADS = {"lookhere": (3, 3, 1), "xpos": (3, 4, 1)}
DIGITS, TOLERANCE = 8, 2e-8
FIXED_AT_ITS_GRID = ("none", "absolute", "sincos", "table", "levit", "factorized")  # their oracles hold at the training grid
INPUTS = {  # name: (phase, amplitude)
    "q": (0.1, 1.5),
    "k": (0.7, 1.5),
    "v": (1.3, 1.0),
    "pos_embed": (1.9, 0.5),
    "relative_position_bias_table": (2.5, 0.5),
    "table_h": (3.1, 0.5),
    "table_w": (3.7, 0.5),
    "freqs": (4.3, 1.2),
    "relative_attention_bias": (4.9, 0.5),
    "cpb_mlp.0.weight": (5.5, 0.5),
    "cpb_mlp.0.bias": (6.1, 0.5),
    "cpb_mlp.2.weight": (6.7, 0.5),
    "prefix_bias": (7.3, 0.5),
    "slopes": (7.9, 0.5),
    "direction": (8.5, 0.5),
    "log_a": (9.1, 0.5),
    "log_b": (9.7, 0.5),
    "c": (10.3, 0.5),
    "L": (10.9, 4.0),
    "mlp.0.weight": (11.5, 0.5),
    "mlp.0.bias": (12.1, 0.5),
    "mlp.2.weight": (12.7, 0.5),
    "mlp.2.bias": (13.3, 0.5),
    "key_h": (13.9, 0.5),
    "key_w": (14.5, 0.5),
    "value_h": (15.1, 0.5),
    "value_w": (15.7, 0.5),
    "query_h": (16.3, 0.5),
    "query_w": (16.9, 0.5),
    "rel_pos_h": (17.5, 0.5),
    "rel_pos_w": (18.1, 0.5),
    "u": (18.7, 0.5),
    "v_bias": (19.3, 0.5),
    "w_r": (19.9, 0.5),
    "position": (20.5, 0.5),
    "a": (21.1, 0.3),
    "b": (21.7, 0.3),
    "pos_embed_h": (22.3, 0.5),
    "pos_embed_w": (22.9, 0.5),
    "pos_embed_win": (23.5, 0.5),
    "token_projection.weight": (24.1, 0.3),
    "token_projection.bias": (24.7, 0.3),
    "attention_biases": (25.3, 0.5),
}
SMALL = {"cpb": {"hidden": 5}, "pape": {"parabolas": 3}, "fourier": {"bands": 6}}  # in every case of these keys
OPTIONS = {  # one more case for each, built for TRAINED and evaluated at OTHER, or at the grids given
    "absolute_windowed": [{"period": 1}, {"period": [1, 2]}],
    "fourier": [{"base": 10.0}],
    "clipped": [{"radius": 2}, {"radius": [0, 1]}, {"per_head": False}],
    "t5": [
        {"mode": "sum"},
        {"num_buckets": 8, "max_distance": 4},
        {"bidirectional": False},
        {"num_buckets": [1, 6], "max_distance": [2, 5]},
    ],
    "cpb": [{"policy": "renormalize"}, {"pretrained_window": [4, 6]}],
    "alibi": [
        {"distance": "l1", "learnable": True},
        {"distance": "squared"},
        {"directional": True},
        {"policy": "renormalize"},
    ],
    "log_decay": [{"decay": 0.3}, {"distance": "l1"}, {"directional": True}, {"policy": "renormalize"}],
    "shaw": [{"per_head": True}, {"values": False}, {"radius": [2, 1]}],
    "deberta": [{"radius": 2}],
    "rope_axial": [{"base": 10.0}, {"policy": "linear"}, {"policy": "ntk"}, {"policy": "yarn"}],
    "rope_mixed": [{"policy": "linear"}, {"policy": "ntk"}, {"policy": "yarn"}],
    "rope_normalized": [{"base": 10.0}],
    "xpos": [{"base": 10.0, "gamma": 1.0, "scale_base": 3.0}],
}
ELSEWHERE = {  # further cases: (trained, grid, options)
    "t5": [((1, 6), (1, 9, 1), {"num_buckets": 8, "max_distance": 12})],  # one dimension: 8 rows
    "lookhere": [(TRAINED, (2, 3, 0), {"fov": 180, "slope": 0.5}), (TRAINED, (2, 3, 0), {"fov": 45})],
    # an axis long enough for a band to turn once within it, where yarn begins to keep the frequency
    "rope_axial": [((8, 1), (10, 1, 0), {"policy": "yarn"})],
    "rope_mixed": [((8, 1), (10, 1, 0), {"policy": "yarn"})],
}


def wave(name, *shape):
    """Input `name` as a float64 array, rounded to 4 digits after the point."""
    phase, amplitude = INPUTS[name]
    values = [round(amplitude * math.sin(0.37 * (m + 1) ** 2 + phase), 4) for m in range(math.prod(shape))]
    return np.array(values).reshape(shape)


def table_shapes(key, trained, extra, heads, options):
    """Name -> shape of the additive tables that have prefix rows of their own."""
    lengths = [2 * n - 1 for n in trained]
    if key == "clipped":
        lengths = [2 * R + 1 for R in oracles.radii(options.get("radius"), trained)]
    if key == "t5":
        chosen = {name: options[name] for name in ("num_buckets", "max_distance", "bidirectional") if name in options}
        lengths = [count for count, _ in oracles.t5_axes(trained, **chosen)]
    if key == "factorized" or options.get("mode") == "sum":
        return {"table_h": (lengths[0] + extra, heads), "table_w": (lengths[1], heads)}
    name = "relative_attention_bias" if key == "t5" else "relative_position_bias_table"
    return {name: (math.prod(lengths) + extra, heads if options.get("per_head", True) else 1)}


def bias_shapes(key, prefix, heads, options):
    """Name -> shape of the parameters of the additive functions of the offset."""
    prefixed = {"prefix_bias": (3, heads)} if prefix else {}
    if key == "cpb":
        hidden = options["hidden"]
        first = {"cpb_mlp.0.weight": (hidden, 2), "cpb_mlp.0.bias": (hidden,)}
        return first | {"cpb_mlp.2.weight": (heads, hidden)} | prefixed
    if key == "fire":
        layers = {"mlp.0.weight": (32, 1), "mlp.0.bias": (32,), "mlp.2.weight": (heads, 32), "mlp.2.bias": (heads,)}
        return {"c": (1,), "L": (1,)} | layers | prefixed
    names = {"alibi": ["slopes"] if options.get("learnable") else [], "log_decay": ["log_a", "log_b"]}[key]
    learned = {name: (heads,) for name in names if "decay" not in options}
    return learned | ({"direction": (4, heads)} if options.get("directional") else {})


def content_shapes(key, trained, heads, width, options):
    """Name -> shape of the vectors that meet queries, keys or values."""
    if key == "transformer_xl":
        return {"u": (heads, width), "v_bias": (heads, width), "w_r": (heads, width, heads * width)}
    if key == "pape":
        count = options["parabolas"]
        return {"position": (heads, count, 2), "a": (heads, count, width), "b": (heads, count, width)}
    if key == "decomposed":
        return {f"rel_pos_{axis}": (2 * n - 1, width) for axis, n in zip("hw", trained, strict=True)}
    reaches = zip("hw", oracles.radii(options.get("radius"), trained), strict=True)
    first, second = ("key", "query") if key == "deberta" else ("key", "value" if options.get("values", True) else None)
    per_head = (heads,) if key == "deberta" or options.get("per_head") else ()
    shapes = {axis: (*per_head, 2 * R + 1, width) for axis, R in reaches}
    return {f"{part}_{axis}": shapes[axis] for part in (first, second) if part for axis in "hw"}


def windowed_shapes(trained, prefix, channels, options):
    """Name -> shape of the two embeddings of `absolute_windowed`."""
    period = oracles.pair(options.get("period", 8))
    windows = math.prod(math.ceil(n / m) for n, m in zip(trained, period, strict=True))
    return {"pos_embed": (1, prefix + windows, channels), "pos_embed_win": (1, math.prod(period), channels)}


ADDED_SHAPES = {  # of encodings added to tokens: (trained, prefix, channels, options) -> {name: shape}
    "absolute": lambda trained, prefix, channels, _: {"pos_embed": (1, prefix + math.prod(trained), channels)},
    "absolute_factorized": lambda trained, prefix, channels, _: {
        f"pos_embed_{axis}": (1, n, channels) for axis, n in zip("hw", trained, strict=True)
    },
    "absolute_windowed": windowed_shapes,
    "fourier": lambda trained, prefix, channels, options: {
        "token_projection.weight": (channels, 2 * options["bands"]),
        "token_projection.bias": (channels,),
    },
}


def parameters(key, trained, prefix, options):
    """The learned arrays of an encoding built for a grid, under the names its state dict has."""
    heads, width = SIZES.get(key, (HEADS, WIDTH))
    if key in ADDED_SHAPES:
        shapes = ADDED_SHAPES[key](trained, prefix, heads * width, options)
    elif key == "rope_mixed":
        shapes = {"freqs": (2, heads, width // 2)}
    elif key == "levit":
        shapes = {"attention_biases": (heads, math.prod(trained) + (3 if prefix else 0))}
    elif key in ("table", "factorized", "clipped", "t5"):
        shapes = table_shapes(key, trained, 3 if prefix else 0, heads, options)
    elif key in ("cpb", "alibi", "log_decay", "fire"):
        shapes = bias_shapes(key, prefix, heads, options)
    elif key in ("shaw", "decomposed", "transformer_xl", "deberta", "pape"):
        shapes = content_shapes(key, trained, heads, width, options)
    else:
        shapes = {}
    return {name: wave(name, *shape) for name, shape in shapes.items()}


def case(key, trained, grid, options):
    """One grid: inputs and what the oracle makes of them."""
    (h, w, prefix), (heads, width) = grid, SIZES.get(key, (HEADS, WIDTH))
    options = SMALL.get(key, {}) | options
    q, k, v = (wave(name, heads, prefix + h * w, width) for name in "qkv")
    learned, rule = parameters(key, trained, prefix, options), oracles.ORACLES[key]
    built = {"trained": trained} if "trained" in inspect.signature(rule).parameters else {}
    logits, output = rule(q, k, v, h, w, prefix, **built, **options, **learned)
    entry = {"grid": {"h": h, "w": w, "prefix": prefix}, "trained": trained, "options": options, "parameters": learned}
    entry |= {"q": q, "k": k, "v": v}
    if key == "absolute":
        entry["tokens"] = learned["pos_embed"][0]
    if key == "sincos":
        entry["tokens"] = oracles.sincos_tokens(h, w, prefix, heads * width)
    return entry | {"logits": logits, "output": output}


def cases(key):
    """(trained, grid, options) of every case of a key."""
    found = [(grid[:2], grid, {}) for grid in GRIDS]
    if key not in FIXED_AT_ITS_GRID:
        found.append((TRAINED, LARGER_OF_MANY_HEADS.get(key, LARGER), {}))
    return found + [(TRAINED, OTHER, options) for options in OPTIONS.get(key, [])] + ELSEWHERE.get(key, [])


def plain(array):
    """A numpy array as nested lists; JSON has no infinity."""
    if array.ndim:
        return [plain(part) for part in array]
    return "-inf" if np.isneginf(array) else round(float(array), DIGITS) + 0.0


def document(key):
    """What <key>.json holds, as plain Python values."""
    about = "q, k, v, output [H, N, D]; logits [H, N, N] before softmax, scaled and biased"
    if key in ("absolute", "sincos"):
        about += "; tokens [N, C], split into heads, are added to q, k and v (identity projections of x + tokens)"
    heads, width = SIZES.get(key, (HEADS, WIDTH))
    made = [case(key, *chosen) for chosen in cases(key)]
    content = {"encoding": key, "about": about, "heads": heads, "width": width, "cases": made}
    return json.loads(json.dumps(content, default=plain))


def text(content, indent=""):
    """JSON with one key a line and every array on the line of its key; a list of objects has one object after the other."""
    if isinstance(content, dict) and content:
        inner = [f"{indent} {json.dumps(name)}: {text(value, indent + ' ')}" for name, value in content.items()]
        return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return "[" + ", ".join(text(value, indent) for value in content) + "]"
    return json.dumps(content, ensure_ascii=False)


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
    for key in oracles.ORACLES:
        file, made = arguments.folder / f"{key}.json", document(key)
        if not arguments.check:
            file.write_text(text(made) + "\n")
        elif not file.exists():
            wrong.append(f"{file}: missing")
        else:
            wrong += [f"{file}: {path}" for path in differences(json.loads(file.read_text()), made)]
    if wrong:
        sys.exit("golden files differ from the oracles; rerun without --check if the oracle changed:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
