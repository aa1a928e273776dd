"""Sentences: what a reader is told in each case, word by word."""

from helpers import each
from helpers.rows import row, rows_of
from vitrel.evaluate.sentences import notes, sentences
from vitrel.evaluate.verdicts import judge

BIG, SMALL = 10_000, 100


def told(rows, **how):
    return [*sentences(judge(rows, **how)).values()]


@each(
    ("levels", "n", "expected"),
    [
        ((90, 89.9, 90.1), BIG, "Against its training size, 64 px, vit is safe at any other size (less than 2 points lost)."),
        ((90, 60, 50), BIG, "Against its training size, 64 px, vit loses 30 to 40 points at any other size (fine-tune it "
                            "there)."),
        ((90, 89, 88), SMALL, "Whether vit changes with the size these 100 images cannot tell."),
        ((80, 85, 78), BIG, "Against its training size, 64 px, vit gains 5 points at 96 px and loses 2 points at 128 px "
                            "(fine-tune it there)."),
        ((90, 89, 50), 700, "Against its training size, 64 px, vit loses 40 points at 128 px (fine-tune it there); for 96 px "
                            "these 700 images cannot tell."),
        ((90,), BIG, "The top-1 of vit is 90.0 % at 64 px, its training size; no other was evaluated."),
        ((10.4, 10.3), BIG, "Train vit first: its top-1 of 10.4 % at 64 px is not shown to be above the 10.0 % of always "
                            "predicting the most frequent class."),
    ],
)  # fmt: skip
def test_one_model(levels, n, expected):
    assert told(rows_of({"vit": levels}, n=n)) == [expected]


def test_a_training_size_that_is_missing_is_asked_for():
    [scale] = told(rows_of({"vit": (90, 80)}, ("96x96", "128x128")))
    assert scale == "Add --size 64x64: vit was trained at 64 px, and without that no size can be called safe."
    [native] = told(rows_of({"vit": (90, 80)}, train_size="196t"))
    assert native.startswith("Add --protocol native: vit was trained at native shape, 196 tokens at most, and")


@each(
    ("a", "b", "n", "expected"),
    [
        ((90, 89.9, 90.1), (65, 65.2, 64.8), BIG, "Use a at any size: it is better than b at each of them, by 25 points."),
        ((65, 65.2, 64.8), (90, 89.9, 90.1), BIG, "a is behind b at every size, by 25 points."),
        ((90, 90, 80), (90, 80, 90), BIG, "Use a at 96 px: it is better than b there, by 10 points; it is behind b at 128 px, "
                                          "by 10 points; elsewhere these 10,000 images cannot tell the two apart."),
        ((90, 90, 89), (90, 89, 89), SMALL, "These 100 images cannot tell a from b at any size. Whether a changes with the "
                                            "size these 100 images cannot tell."),
        ((90,), (80,), BIG, "Use a at 64 px: it is better than b there, by 10 points."),
        ((90,), (90,), BIG, "These 10,000 images cannot tell a from b at 64 px."),
    ],
)  # fmt: skip
def test_two_models(a, b, n, expected):
    assert told(rows_of({"a": a, "b": b}, n=n))[0].startswith(expected)


def test_four_models():
    levels = {"swin": (79, 79, 80), "shaw": (67, 69, 70), "rope": (66.5, 67, 58), "absolute": (66, 52, 46)}
    swin, shaw, rope, absolute = told(rows_of(levels, n=1500))
    assert swin == (
        "Use swin at any size: it is better than the others at each of them, by 10 points or more. Whether it changes with the "
        "size these 1,500 images cannot tell."
    )
    assert shaw.startswith(
        "shaw is behind swin at every size, by 10 to 12 points. Against its training size, 64 px, it is safe"
    )
    assert "it loses 8.5 points at 128 px (fine-tune it there); for 96 px these 1,500 images cannot tell." in rope
    assert absolute.endswith("it loses 14 to 20 points at any other size (fine-tune it there).")


def test_models_that_share_the_lead_or_are_behind_several():
    levels = {"a": (90, 90, 90), "b": (90, 90, 90), "c": (70, 70, 70), "d": (50, 50, 50)}
    a, b, c, _ = told(rows_of(levels, n=2000))
    assert a.startswith("No other is shown to be better than a at any size.") and b.startswith("No other is shown")
    assert c.startswith("c is behind a at every size, by 20 points.")
    a, b, c = told(rows_of({"a": (90, 90, 80), "b": (90.1, 80, 90), "c": (50, 50, 50)}))
    assert a.startswith(
        "Use a at 96 px: it is better than the others there, by 10 points or more; it is behind b at 128 px, by 10 points; "
        "elsewhere no other is shown to be better."
    )
    assert c.startswith("c is behind others at every size, by 40 points.")


def test_several_seeds_are_part_of_the_evidence():
    rows = []
    for seed, apart in enumerate((-0.5, 0, 0.5)):
        rows += rows_of({"a": (90 + apart, 85 + apart), "b": (80 + apart, 79 + apart)}, seed=seed)
    assert told(rows)[1].endswith("Whether it changes with the size these 3 seeds and 10,000 images cannot tell.")
    assert not any("seed" in text for text in notes(judge(rows)))
    assert notes(judge(rows_of({"a": (90,), "b": (80,)}))) == [
        "One seed each: this is about these trained models; trained again, results may differ."
    ]
    assert "this trained model;" in notes(judge([row()]))[0]


def test_images_that_were_not_used_are_told_where_something_is_open():
    _, unused = notes(judge(rows_of({"vit": (90, 89, 88.9)}, n=500), unused=444))
    assert unused == "444 images of the data were not used: give a larger --n, or none, to tell more."
    assert len(notes(judge(rows_of({"vit": (90, 89.9, 90)}), unused=444))) == 1


def test_policies_protocols_and_an_encoding_that_does_nothing_are_told():
    rows = [row(), *(row("128x128", top1, name) for name, top1 in (("geometric", 70.0), ("bicubic", 89.9)))]
    assert told(rows)[0].endswith("At 128 px --policy bicubic is better by 20 points.")
    for policy, options in (("log_n", "--log-n"), ("rescale+bicubic+log_n", "--policy rescale bicubic --log-n")):
        found = told([row(), row("128x128", 70.0, "geometric"), row("128x128", 90.0, policy)])[0]
        assert found.endswith(f"At 128 px {options} is better by 20 points.")
    sizes = ("64x64", "48x48", "96x96")
    rows = rows_of({"m": (90, 60, 60)}, sizes) + rows_of({"m": (90, 80, 60)}, sizes, protocol="canvas")
    canvas = "At 48 px the canvas protocol is better by 20 points, at the same cost (objects keep their size in pixels: "
    assert canvas in told(rows)[0]
    assert told(rows_of({"m": (90, 90, 90)}, position_share=0.001))[0].endswith(
        "Its position encoding does next to nothing: it changes attention by 0.1 %."
    )


def test_sizes_that_are_not_square_and_budgets_have_their_names():
    rows = rows_of({"a": (90, 80, 70)}, ("192x256", "256x192", "384x512"), train_size="192x256")
    assert told(rows) == [
        "Against its training size, 192x256 px, a loses 10 to 20 points at any other size (fine-tune it there)."
    ]
    of = {"label": "a", "protocol": "native", "train_size": "196t"}
    rows = [row("224x224", 90, budget=196, **of), row("128x128", 60, budget=64, **of), row("256x256", 80, budget=256, **of)]
    assert told(rows[:2]) == ["Against its training size, 196 tokens, a loses 30 points at 64 tokens (fine-tune it there)."]
    assert told(rows) == [
        "Against its training size, 196 tokens, a loses 10 to 30 points at any other size (fine-tune it there)."
    ]
