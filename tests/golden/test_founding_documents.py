"""The founding documents' numbers, recomputed by vitrel's public functions; the page that shows them."""

import json
import math
import re
from pathlib import Path

import numpy as np
import torch
from numpy.testing import assert_allclose

import vitrel
from examples.skew import relative_shift
from helpers import ROOT, each

DOCUMENTS = json.loads((Path(__file__).parent / "founding_documents.json").read_text())
CASES = DOCUMENTS["cases"]
COMPUTED = [statement for statement in DOCUMENTS["statements"] if "values" in statement]
GRID = vitrel.Grid(2, 2)
PAGE = (ROOT / "docs" / "founding_documents.md").read_text("utf-8")
LISTED = {tuple(entry["offset"]): entry["value"] for entry in CASES["square_relative"]["inputs"]["bias"]}


def compare(computed, expected):
    if isinstance(expected, dict):
        assert computed.keys() == expected.keys()
        for name in expected:
            compare(computed[name], expected[name])
    elif isinstance(computed, list) and isinstance(computed[0], list | str):
        assert computed == expected  # names, or lists of unequal length
    else:
        computed = np.asarray(computed, float)
        assert computed.shape == np.shape(expected)
        assert_allclose(computed, expected, rtol=0, atol=DOCUMENTS["tolerance"])


def crossing(condition, low, high):
    """The point of [low, high] above which `condition` holds."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high


def groups_of(inputs, bucket):
    """The buckets of groups of distances, `bucket` a function of the distance."""
    found = [sorted({bucket(distance) for distance in range(first, last + 1)}) for first, last in inputs["groups"]]
    assert all(group == list(range(group[0], group[-1] + 1)) for group in found)
    return {
        "buckets_per_group": [len(group) for group in found],
        "first_and_last_bucket": [[group[0], group[-1]] for group in found],
    }


def built(key, grid, parameters, **options):
    """An encoding of one head of width 2 with the given parameters."""
    encoding = vitrel.create_position(key, grid, 1, 2, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in encoding.named_parameters():
            parameter.copy_(torch.tensor(parameters[name], dtype=torch.float64).view_as(parameter))
    return encoding


def explained(inputs, position="none", **options):
    q, k, v = (inputs.get(name, inputs.get("x")) for name in "qkv")
    return vitrel.explain(q, k, v, position, (inputs["h"], inputs["w"]), **options)


def a_row(inputs, biases, **options):
    """Explanation with one bias per offset i - j in a row of tokens."""
    return explained(inputs, vitrel.create_position("table", (1, inputs["w"]), 1, 2).set_biases(biases), **options)


def five_by_vitrel(inputs):
    e = explained(inputs, "log_decay", decay=inputs["lambda"], tokens=inputs["tokens"])
    assert e.names == tuple(inputs["tokens"])
    bias = e.added["bias[dy, dx]"][0]
    maximum = e.biased[0].amax(-1)
    shifted = e.biased[0] - maximum[:, None]
    return {
        "raw": e.raw[0],
        "scaled": e.scaled[0],
        "log_distance": bias[0] / -inputs["lambda"],
        "bias_by_distance": bias[0],
        "bias": bias,
        "biased": e.biased[0],
        "maximum": maximum,
        "shifted": shifted,
        "exponentials": shifted.exp(),
        "sums": shifted.exp().sum(-1),
        "weights": e.weights[0],
        "output": e.output[0],
        "change": (e.weights - e.weights_without)[0],
    }


def without_by_vitrel(inputs):
    e = explained(inputs)
    return {"weights": e.weights[0], "output_rows": {str(i): row for i, row in enumerate(e.output[0])}}


def offsets_by_vitrel(inputs):
    offsets = row_offsets(inputs["length"])
    return {"relative_pos": -offsets, "distances": offsets.abs()}


def lambda_by_vitrel(inputs):
    def row(decay):
        return explained(inputs, "log_decay", decay=decay, query=inputs["row"]).weights[0, 0]

    return {
        "weights_without": row(0),
        "weights": row(inputs["lambda"]),
        "becomes_maximum_at": round(crossing(lambda rate: row(rate).argmax() == 0, 0, 5), 4),
        "exceeds_half_at": round(crossing(lambda rate: row(rate)[0] > 0.5, 0, 5), 3),
    }


def linear_by_vitrel(inputs):
    def alibi(length):
        return built("alibi", (1, length), {"slopes": [inputs["slope"]]}, learnable=True)

    def near(position, length, **options):
        x = torch.zeros(length, 2)  # the same contents for all
        return vitrel.explain(x, x, x, position, query=length - 1, **options).weights[0, 0, -8:].sum().item()

    return {
        "weights": explained(inputs, alibi(5), query=inputs["row"]).weights[0, 0],
        "near_linear": [near(alibi(length), length) for length in inputs["lengths"]],
        "near_log": [near("log_decay", length, decay=inputs["slope"]) for length in inputs["lengths"]],
    }


def asymmetric_by_vitrel(inputs):
    biases = {(0, d): -(inputs["earlier"] if d > 0 else inputs["later"]) * math.log1p(abs(d)) for d in range(-4, 5)}
    e = a_row(inputs, biases)
    alike = explained(inputs, "log_decay", decay=inputs["later"])
    row = inputs["row"]
    return {
        "bias": e.added["bias[dy, dx]"][0, row],
        "weights": e.weights[0, row],
        "mat_to_The": [alike.weights[0, 4, 0], e.weights[0, 4, 0]],
    }


def shaw_by_vitrel(inputs):
    shaw = built("shaw", (1, 3), {"key_h": [[0, 0]], "key_w": inputs["keys"]}, radius=(0, 2), values=False)
    e = explained(inputs, shaw)
    assert list(e.added) == ["content-position"]

    def component(axis):  # of the key and its vector, by queries [1, 0] or [0, 1]
        q = torch.eye(2)[axis].expand(3, 2)
        return vitrel.explain(q, inputs["x"], inputs["x"], shaw).biased[0] * math.sqrt(2)

    sums = torch.stack([component(0), component(1)], -1)
    found = {"sums_of_query_0": sums[0], "sums": sums.flatten(0, 1)}
    return found | {"dots": e.biased[0] * math.sqrt(2), "logits": e.biased[0]}


def slope_by_vitrel(inputs):
    e = a_row(inputs, {(0, d): -inputs["m"] * d for d in range(-2, 3)})
    return {"offsets": row_offsets(3), "added": e.added["bias[dy, dx]"][0], "logits": e.biased[0]}


def rope_by_vitrel(inputs):
    encoding = built("rope_mixed", (1, 3), {"freqs": [[[0]], [[math.radians(inputs["degrees"])]]]})
    cos, sin = (part[0, :, 0] for part in encoding(vitrel.Grid(1, 3)).rotary)
    x, y = torch.tensor(inputs["x"]).double().unbind(-1)
    logits = explained(inputs, encoding).biased[0]
    rotated = torch.stack((x * cos - y * sin, x * sin + y * cos), -1).detach()
    return {"rotated": rotated, "dots": logits * math.sqrt(2), "logits": logits}


def variants_by_vitrel(inputs):
    bias = a_row(inputs, {(0, d - 2): b for d, b in enumerate(inputs["bias"])}).biased
    rest = {"shaw": shaw_by_vitrel, "rope": rope_by_vitrel, "alibi": slope_by_vitrel}
    return {"bias": bias[0, 0]} | {name: f(inputs)["logits"][0] for name, f in rest.items()}


def absolute_by_vitrel(inputs):
    return explained(inputs, built("absolute", (2, 2), {"pos_embed": [inputs["pos_embed"]]}))


def terms_by_vitrel(inputs):
    added = absolute_by_vitrel(inputs).added
    return {name.replace("-", "_"): part[0] for name, part in added.items()}


def relative_by_vitrel(offset):
    table = vitrel.create_position("table", (2, 2), 1, 2).set_biases(LISTED, offset=offset)
    return explained(CASES["square_relative"]["inputs"], table)


def targets_by_vitrel(inputs):
    def largest(logits):
        return [torch.isclose(row, row.max(), atol=1e-6).nonzero()[:, 0].tolist() for row in logits]

    readings = {"query_key": "query-key", "key_query": "key-query"}
    return {name: largest(relative_by_vitrel(offset).biased[0]) for name, offset in readings.items()}


def listed_by_vitrel(inputs):
    found = {}
    for reading in ("query_key", "key_query"):
        bias = relative_by_vitrel(reading.replace("_", "-")).added["bias[dy, dx]"][0]
        found[f"biases_{reading}"] = [bias[query, key] for query, key in inputs[f"pairs_{reading}"]]
    return found


def outweighed_by_vitrel(inputs):
    biases = {tuple(entry["offset"]): entry["value"] for entry in inputs["bias"]}
    e = explained(inputs, vitrel.create_position("table", (2, 2), 1, 2).set_biases(biases, "key-query"))
    return {"content": e.scaled[0], "logits": e.biased[0], "weights": e.weights[0]}


def heads_by_vitrel(inputs):
    x, found = torch.zeros(9, 2), []
    for head in inputs["heads"]:
        (dy, dx), table = head["offset"], vitrel.create_position("table", (3, 3), 1, 2)
        e = vitrel.explain(x, x, x, table.set_biases({(dy, dx): head["value"]}, "key-query"), (3, 3), query=(1, 1))
        found.append(e.weights[0, 0, 3 * (1 + dy) + 1 + dx])
    return {"weights": found}


def clipped_by_vitrel(inputs, rows):
    """What `clipped` adds in a row of tokens, with one of the rows for each offset -R ... R."""
    n, zeros = inputs["length"], torch.zeros(inputs["length"], 2)
    encoding = built("clipped", (1, n), {"relative_position_bias_table": rows}, radius=(0, inputs["reach"]))
    return vitrel.explain(zeros, zeros, zeros, encoding).added["bias[dy, dx]"][0]


def row_offsets(n):
    """i - j of n tokens in a row, [n, n]."""
    grid = vitrel.Grid(1, n)
    return grid.offsets("w")[grid.index("w")]


def clip_by_vitrel(inputs):
    return {
        "offsets": row_offsets(inputs["length"]),
        "clipped": clipped_by_vitrel(inputs, list(range(-inputs["reach"], inputs["reach"] + 1))),
        "biases": clipped_by_vitrel(inputs, inputs["bias"]),
    }


def stored_by_vitrel(inputs):
    number = count("clipped", (1, inputs["length"]), radius=(0, inputs["reach"]))
    return {"count": number, "biases": clipped_by_vitrel(inputs, inputs["bias"])}


def steps_by_vitrel(inputs):
    offsets, shift = row_offsets(inputs["length"] + inputs["shift"]), inputs["shift"]
    return {
        "steps": [offsets[i, j] for i, j in inputs["pairs"]],
        "change_of_offsets": (offsets[shift:, shift:] - offsets[:-shift, :-shift]).abs().max(),
    }


def shifted_by_vitrel(inputs):
    (near, far), n = inputs["first"], len(inputs["tokens"])
    offsets, x = row_offsets(far + n), torch.zeros(far + n, 2)

    def bias(first):  # of n tokens from `first` on, the last of a row
        e = vitrel.explain(x[:n], x[: first + n], x[: first + n], "log_decay", decay=inputs["lambda"])
        return e.added["bias[dy, dx]"][0, :, first:]

    return {
        "offset_difference": (offsets[near : near + n, near : near + n] - offsets[far:, far:]).abs().max(),
        "bias_difference": (bias(near) - bias(far)).abs().max(),
    }


def buckets_by_vitrel(inputs, length=4096):
    """{offset: bucket} of T5 in one dimension, whose table has one row per bucket."""
    options = {name: inputs[name] for name in ("num_buckets", "max_distance")}
    encoding = vitrel.create_position("t5", (1, 512), 1, 2, **options)
    assert encoding.relative_attention_bias.shape == (inputs["num_buckets"], 1)
    grid = vitrel.Grid(1, length)
    return dict(zip(grid.offsets("w").tolist(), encoding.bucket("w", grid).tolist(), strict=True))


def t5_by_vitrel(inputs):
    bucket = buckets_by_vitrel(inputs)
    first: dict[int, int] = {}
    for distance in range(4096):
        first.setdefault(bucket[distance], distance)
    last = max(first)
    (added,) = {bucket[-d] - bucket[d] for d in range(1, 4096)}
    return {
        "exact_up_to": next(d for d in range(64) if bucket[d + 1] == bucket[d + 2]),
        "ranges": [[first[b], first[b + 1] - 1, b] for b in range(8, last)],
        "last": {"from": first[last], "bucket": last},
        "negative_adds": added,
    }


def demo_by_vitrel(inputs):
    bucket = buckets_by_vitrel(inputs)
    return {"buckets": [bucket[-d] for d in inputs["offsets"]], "by_distance": [bucket[d] for d in inputs["distances"]]}


def shift_by_vitrel(inputs):
    n = inputs["n"]
    return {"shifted": relative_shift(10 * torch.arange(n)[:, None] + torch.arange(2 * n - 1))}


def length_by_vitrel(inputs):
    x = torch.zeros(max(inputs["lengths"]), 2)
    rows = [
        vitrel.explain(x[:1], x[:n], x[:n], "log_decay", decay=inputs["lambda"]).weights.flatten() for n in inputs["lengths"]
    ]
    return {
        "entropy": [torch.special.entr(row).sum().item() for row in rows],
        "above": [(row > 0.01).sum().item() for row in rows],
    }


def count(key, grid, heads=1, dim=8, **options):
    return sum(p.numel() for p in vitrel.create_position(key, grid, heads, dim, **options).parameters())


def sizes_by_vitrel(inputs):
    window, line = vitrel.Grid(*inputs["window"]), vitrel.Grid(1, inputs["lengths"][-1])
    found = {"window_rows": count("table", window), "window_reach": int(window.offsets().max())}
    found |= {f"offsets_of_{n}": count("table", (1, n)) for n in inputs["lengths"]}
    found["t5_parameters"] = count("t5", line, inputs["heads"], num_buckets=inputs["buckets"], max_distance=128)
    return found | {"one_per_distance_parameters": count("table", line, inputs["heads"])}


def listings_by_vitrel(inputs):
    reach, width = inputs["shaw_reach"], inputs["shaw_width"]
    shaw = vitrel.create_position("shaw", (1, 64), 8, width, radius=(0, reach))
    xl = vitrel.create_position("transformer_xl", (1, 128), inputs["xl_heads"], inputs["xl_width"])
    return {
        "shaw_rows": len(shaw.key_w),
        "shaw_parameters": shaw.key_w.numel() + shaw.value_w.numel(),
        "xl_parameters": xl.u.numel() + xl.v_bias.numel(),
        "t5_parameters": count("t5", (1, 64), inputs["t5_heads"], num_buckets=inputs["t5_buckets"], max_distance=128),
    }


def sentence_by_vitrel(inputs):
    tokens = inputs["tokens"]
    distance = row_offsets(len(tokens)).abs()
    pairs = (("The", "the"), ("cat", "sat"), ("The", "mat"))
    return {f"{a}_{b}": distance[tokens.index(a), tokens.index(b)] for a, b in pairs}


def figures_by_vitrel(inputs):
    e = explained(inputs, "log_decay", decay=inputs["lambda"])
    bias = e.added["bias[dy, dx]"][0, 0]
    found = {"sat_to_itself": e.weights[0, 2, 2], "sat_to_itself_without": e.weights_without[0, 2, 2]}
    return {"penalty_ratio": bias[4] / bias[1]} | found


VITREL = {
    "five_tokens_log_decay": five_by_vitrel,
    "five_tokens_no_decay": without_by_vitrel,
    "five_tokens_offsets": offsets_by_vitrel,
    "lambda_exercise": lambda_by_vitrel,
    "linear_decay": linear_by_vitrel,
    "asymmetric_exercise": asymmetric_by_vitrel,
    "three_tokens_content": lambda inputs: {"logits": explained(inputs).biased[0]},
    "three_tokens_additive": lambda inputs: {
        "logits": a_row(inputs, {(0, d - 2): bias for d, bias in enumerate(inputs["bias"])}).biased[0]
    },
    "three_tokens_shaw_keys": shaw_by_vitrel,
    "three_tokens_alibi_signed": slope_by_vitrel,
    "three_tokens_alibi_symmetric": lambda inputs: {
        "logits": explained(inputs, built("alibi", (1, 3), {"slopes": [inputs["m"]]}, learnable=True)).biased[0]
    },
    "three_tokens_rope": rope_by_vitrel,
    "four_variants": variants_by_vitrel,
    "square_content": lambda inputs: {"logits": explained(inputs).biased[0]},
    "square_absolute": lambda inputs: {
        "keys": torch.tensor(inputs["x"]) + built("absolute", (2, 2), inputs)(GRID).tokens,
        "row_0": absolute_by_vitrel(inputs).biased[0, 0] * math.sqrt(2),
        "logits": absolute_by_vitrel(inputs).biased[0],
    },
    "square_absolute_terms": terms_by_vitrel,
    "square_relative": lambda inputs: {
        "logits": relative_by_vitrel("query-key").biased[0],
        "logits_key_query": relative_by_vitrel("key-query").biased[0],
    },
    "square_targets": targets_by_vitrel,
    "square_listed": listed_by_vitrel,
    "content_outweighs_bias": outweighed_by_vitrel,
    "four_heads": heads_by_vitrel,
    "clip": clip_by_vitrel,
    "stored_biases": stored_by_vitrel,
    "t5_buckets": t5_by_vitrel,
    "t5_groups": lambda inputs: groups_of(inputs, buckets_by_vitrel(inputs).get),
    "t5_exercise": lambda inputs: {"buckets": [buckets_by_vitrel(inputs)[d] for d in inputs["distances"]]},
    "t5_demo": demo_by_vitrel,
    "relative_shift": shift_by_vitrel,
    "length_analysis": length_by_vitrel,
    "sizes": sizes_by_vitrel,
    "sizes_of_listings": listings_by_vitrel,
    "sentence": sentence_by_vitrel,
    "steps_between_tokens": steps_by_vitrel,
    "shifted_sentence": shifted_by_vitrel,
    "figures": figures_by_vitrel,
}


def test_every_case_is_checked():
    assert VITREL.keys() == CASES.keys()


@each("name", VITREL)
def test_by_vitrel(name):
    with torch.no_grad():
        compare(VITREL[name](CASES[name]["inputs"]), CASES[name]["expected"])


def printed_values(case: dict) -> dict:
    """{quantity: what the document prints, or its listing returns}."""
    return case.get("printed") or case.get("returned") or {}


def same(case: dict, quantity: str, printed, exact) -> bool:
    """True if a printed number is the exact one to the printed digits; of a list, which no digits have, if it is the same."""
    if isinstance(exact, list):
        return printed == exact
    digits = case["digits"] if isinstance(case["digits"], int) else case["digits"][quantity]
    return abs(printed - exact) <= 0.5001 * 10**-digits + 5e-5 * (digits < 4)  # exact itself is rounded to four digits


def disagreements(case: dict, quantity: str) -> list[list[int]]:
    """Entries of a printed quantity that differ from the exact one, each a list of indices; [[]] of a single number."""

    def entries(printed, exact, place, depth):
        if depth and isinstance(exact, dict):
            exact = [exact[name] for name in printed]
            printed = list(printed.values())
        if depth and isinstance(exact, list):
            pairs = zip(printed, exact, strict=False)  # a document may print the first rows alone
            return [entry for i, pair in enumerate(pairs) for entry in entries(*pair, [*place, i], depth - 1)]
        return [] if same(case, quantity, printed, exact) else [place]

    ragged = quantity in ("query_key", "key_query")  # lists of keys, compared as a whole
    return entries(printed_values(case)[quantity], case["expected"][quantity], [], 1 if ragged else 2)


@each("name", CASES)
def test_printed_values_differ_where_the_file_says_so(name):
    """Neither more nor fewer entries, each with a reason."""
    case = CASES[name]
    listed = {misprint["of"]: misprint["entries"] for misprint in case["misprints"]}
    assert all(misprint["reason"] for misprint in case["misprints"])
    differ = {quantity: disagreements(case, quantity) for quantity in printed_values(case)}
    assert {quantity: sorted(entries) for quantity, entries in differ.items() if entries} == {
        quantity: sorted(entries) for quantity, entries in listed.items()
    }


def test_a_wrong_digit_is_found():
    case = {"digits": 3, "expected": {"a": [[0.7071, 0.3]], "b": 1.25}, "printed": {"a": [[0.707, 0]], "b": 1.25}}
    assert disagreements(case, "a") == [[0, 1]] and disagreements(case, "b") == []
    case["printed"] |= {"a": [[0.708, 0.3]], "b": 1.252}
    assert disagreements(case, "a") == [[0, 0]] and disagreements(case, "b") == [[]]


def test_what_the_listing_of_the_shift_returns():
    """Its padding, reshape and transposition, in numpy."""
    x = 10 * np.arange(3)[:, None] + np.arange(5)
    returned = np.pad(x, ((0, 0), (1, 0))).reshape(6, 3)[1:4].T
    assert returned.tolist() == CASES["relative_shift"]["returned"]["shifted"]


def log_distances(*distances):
    x = torch.zeros(9, 2)
    return (-vitrel.explain(x, x, x, "log_decay", decay=1.0).added["bias[dy, dx]"])[0, 0, list(distances)].tolist()


def gains():
    """What each of the five tokens gains in attention to itself."""
    e = explained(CASES["five_tokens_log_decay"]["inputs"], "log_decay", decay=0.3)
    gained = (e.weights - e.weights_without)[0].diagonal().tolist()
    return dict(zip(CASES["five_tokens_log_decay"]["inputs"]["tokens"], gained, strict=True))


def losses(query, keys):
    """What keys lose of a query's attention among the five tokens."""
    e = explained(CASES["five_tokens_log_decay"]["inputs"], "log_decay", decay=0.3)
    return {"losses": (e.weights - e.weights_without)[0, query, keys]}


def largest_bias():
    inputs = CASES["three_tokens_additive"]["inputs"]
    biases = {(0, d - 2): bias for d, bias in enumerate(inputs["bias"])}
    query, key = divmod(a_row(inputs, biases).added["bias[dy, dx]"][0].argmax().item(), 3)
    assert biases[0, query - key] == inputs["bias"][-1]
    return {"query": query, "key": key}


def bias_of_one():
    x = torch.zeros(4, 4)
    table = vitrel.create_position("table", (1, 4), 1, 4).set_biases({(0, d): 1.0 for d in range(-3, 4)})
    (value,) = vitrel.explain(x, x, x, table).biased.unique().tolist()
    return value


def terms_of_deberta():
    x = torch.randn(4, 4)
    return ["content-content", *vitrel.explain(x, x, x, "deberta").added]


def shuffled():
    """First row of logits of the four patches before and after shuffling; logits and outputs are shuffled along."""
    x, order = torch.tensor(CASES["square_content"]["inputs"]["x"]), [2, 0, 3, 1]
    before, after = (vitrel.explain(x, x, x, "none", (2, 2)) for x in (x, x[order]))
    assert torch.equal(after.biased[0], before.biased[0][order][:, order]) and not torch.equal(after.biased, before.biased)
    assert_allclose(after.output[0], before.output[0][order], rtol=0, atol=1e-12)
    return {"before": before.biased[0, 0], "after": after.biased[0, 0]}


def mixed_readings():
    e = relative_by_vitrel("query-key")
    query, key = [0, 0, 2, 3], [1, 2, 0, 0]
    column = [LISTED[tuple((GRID.offsets()[GRID.index("hw")[j, i]]).tolist())] for i, j in zip(query, key, strict=True)]
    biases = (e.biased - e.scaled)[0, query, key]
    assert [math.copysign(1, x) for x in column] == [-1, -1, 1, 1]
    assert all(b * shown < 0 for b, shown in zip(biases.tolist(), column, strict=True))
    return {"content": e.scaled[0, query, key], "biases": biases}


def least_of_row_0():
    row = relative_by_vitrel("query-key").biased[0, 0]
    return {"least": row.argmin(), "logits": row[[1, 3]]}


def lowest_scores():
    inputs = CASES["five_tokens_log_decay"]["inputs"]
    names, raw = inputs["tokens"], explained(inputs).raw[0]
    return {"pairs": [f"{names[i]} {names[j]}" for i, j in (raw == raw.min()).nonzero().tolist()]}


def vectors_of_transformer_xl():
    """Different vectors of the offsets of 100 tokens."""
    encoding, grid = vitrel.create_position("transformer_xl", (1, 8), 1, 8), vitrel.Grid(1, 100)
    return {"vectors": len(encoding(grid).tables[1].query[0].unique(dim=0))}


def other_sizes():
    """Rows of tables for 14x14 and 24x24 patches, Swin's window staying 7x7, and those that are interpolated between these."""
    small, large, window, dim = vitrel.Grid(14, 14), vitrel.Grid(24, 24), vitrel.Grid(7, 7), 8
    axes = {"swin": ("table", window, window), "beit": ("table", small, large), "vitdet": ("decomposed", small, large)}
    axes |= {key: (key, small, large) for key in ("alibi", "cpb")}
    rows, interpolated = {}, {}
    for name, (key, trained, other) in axes.items():
        encoding, width = vitrel.create_position(key, trained, 1, dim), dim if key == "decomposed" else 1
        interpolated[name] = sum(encoding.resampled(other).values()) / width
        if name in ("swin", "beit", "vitdet"):
            parts = 2 if key == "decomposed" else 1
            rows[name] = [count(key, grid, 1, dim) / width / parts for grid in (trained, other)]
    return {"rows": rows, "interpolated": interpolated}


def bias_beside_rotation():
    """The greatest difference that a rotation makes to what a bias adds to the logits."""
    both, x = vitrel.create_position("rope_mixed+table", (2, 2), 1, 4, dtype=torch.float64), torch.randn(4, 4).double()
    rope, table = both.parts.values()
    table.set_biases(LISTED)
    of_both, of_rope, of_table, content = (vitrel.explain(x, x, x, p, (2, 2)).biased for p in (both, rope, table, "none"))
    return ((of_both - of_rope) - (of_table - content)).abs().max().item()


def parameters_of_transformer_xl():
    case = CASES["sizes_of_listings"]["inputs"]
    heads, dim = case["xl_heads"], case["xl_width"]
    sizes = {n: p.numel() for n, p in vitrel.create_position("transformer_xl", (1, 8), heads, dim).named_parameters()}
    return {"projection": sizes.pop("w_r"), "biases": sum(sizes.values())}


def overhead():
    """Percent that one addition per score is of the 2 d operations of q.k and the 2 d of the weighted sum."""
    return {"percent": [100 / (4 * d) for d in (4, 64)]}


def terms_of_transformer_xl():
    x = torch.randn(4, 8)
    return {"terms": list(vitrel.explain(x, x, x, "transformer_xl").added)}


STATEMENTS = {
    "class_token": lambda: {"tokens": vitrel.Grid(2, 2, 1).tokens},
    "shuffling": shuffled,
    "below": lambda: {"offset": GRID.offsets()[GRID.index("hw")[0, 2]]},
    "mixed_readings": mixed_readings,
    "least_of_row_0": least_of_row_0,
    "canceled": lambda: {
        "content": relative_by_vitrel("query-key").scaled[0, 1, 0],
        "logits": [relative_by_vitrel(offset).biased[0, 1, 0] for offset in ("query-key", "key-query")],
    },
    "separate_tables": lambda: {"joint": count("table", (7, 7)), "per_axis": count("factorized", (7, 7))},
    "size_of_table": lambda: {"rows": count("table", (7, 7)), "patches": vitrel.Grid(7, 7).tokens},
    "clip_of_transformer_xl": vectors_of_transformer_xl,
    "lowest_score": lowest_scores,
    "other_sizes": other_sizes,
    "xpos": lambda: {"parameters": count("xpos", (4, 4)), "difference": bias_beside_rotation()},
    "size_of_projection": parameters_of_transformer_xl,
    "unused_table": lambda: {
        "log_decay": count("log_decay", (1, 5), decay=0.3),
        "t5": count("t5", (1, 512), num_buckets=32, max_distance=128),
    },
    "overhead": overhead,
    "query_biases": terms_of_transformer_xl,
    "clipped_rows": lambda: {"rows": count("clipped", (1, 7), radius=(0, 2))},
    "sign_of_offset": largest_bias,
    "unlisted_offset": lambda: {"bias": relative_by_vitrel("key-query").added["bias[dy, dx]"][0, 2, 1].item()},
    "exact_buckets": lambda: {"exact_up_to": t5_by_vitrel(CASES["t5_buckets"]["inputs"])["exact_up_to"]},
    "doubling": lambda: {"buckets": [buckets_by_vitrel(CASES["t5_buckets"]["inputs"])[d] for d in (8, 16, 32, 64)]},
    "quadrupling": lambda: {"ratios": [log_distances(4)[0] / log_distances(1)[0], log_distances(8)[0] / log_distances(2)[0]]},
    "edge_tokens": lambda: {"order": sorted(gains(), key=gains().get, reverse=True)},
    "middle_token": lambda: {"rank": 1 + sorted(gains(), key=gains().get, reverse=True).index("sat")},
    "equal_losses": lambda: losses(2, [0, 4]),
    "scale_of_bias": lambda: {"adds": bias_of_one()},
    "deberta_bias": lambda: {"terms": terms_of_deberta()},
}


def test_every_statement_is_checked():
    """All but those that one document alone contradicts: they have no values, and name it."""
    assert STATEMENTS.keys() == {statement["id"] for statement in COMPUTED}
    assert all(statement in COMPUTED or re.match(r"00\d ", statement["right"]) for statement in DOCUMENTS["statements"])


@each("statement", COMPUTED, ids=lambda statement: statement["id"])
def test_statements(statement):
    with torch.no_grad():
        compare(STATEMENTS[statement["id"]](), statement["values"])


def test_the_answers_have_the_numbers_of_their_examples():
    answers = {name: case["answer"] for name, case in CASES.items() if "answer" in case}
    assert answers.keys() == {"linear_decay", "asymmetric_exercise"}
    for name, answer in answers.items():
        numbers = re.findall(r"\d\.\d{4}", answer)
        assert len(numbers) >= 2 and all(number in json.dumps(CASES[name]["expected"]) for number in numbers)


def test_the_page_gives_every_value():
    """Each exact and printed number, each misprint and each statement, as it is stored."""
    number = re.compile(r"-?\d+(?:\.\d+)?")
    for name, case in CASES.items():
        part = PAGE.split(f"## {name.replace('_', ' ')}\n")[1].split("\n## ")[0]
        assert case["rule"] in part
        values = re.sub(r'"[^"]*": ', "", json.dumps([case["expected"], printed_values(case)]))
        assert not set(number.findall(values)) - set(number.findall(part)), name
        assert bool(case["misprints"]) == ("differ**" in part or "**no**" in part)
        assert all(misprint["reason"] in PAGE for misprint in case["misprints"])
    for statement in DOCUMENTS["statements"]:
        assert f"| {statement['document']} | {statement['says']} | {statement['right']} |" in PAGE


def test_the_page_has_vitrels_own_trace_of_the_five_tokens():
    inputs = CASES["five_tokens_log_decay"]["inputs"]
    steps = vitrel.explain(
        *(inputs[name] for name in "qkv"), position="log_decay", decay=inputs["lambda"], tokens=inputs["tokens"]
    )
    assert f"\n{steps}\n" in PAGE


def test_the_page_leads_to_every_example_and_to_sections_of_the_explorer():
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {name.replace("_", "-") for name in CASES} <= set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
    explorer = (ROOT / "tools" / "explorer" / "page" / "page.html").read_text("utf-8")
    named = re.findall(r"\[([^\]]+)\]\(\.\./tools/explorer/page/page\.html#(\w+)\)", PAGE)
    assert named and all(f'<a href="#{anchor}">{title}</a>' in explorer for title, anchor in named)
