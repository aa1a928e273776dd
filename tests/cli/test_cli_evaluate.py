import os
import signal

import pandas as pd
import pytest
import timm
import torch

from helpers import command, each
from helpers.checkpoints import write_checkpoint
from helpers.pictures import write_classes
from vitrel.data import class_names
from vitrel.evaluate import run
from vitrel.evaluate.folder import read_folder, read_rows

tool = command("evaluate")
pytestmark = pytest.mark.usefixtures("brief_evaluations")


@pytest.fixture
def checkpoint(tmp_path):
    def write(name, file, classes=class_names("shapes")):
        torch.manual_seed(0)
        how = {"depth": 2} if "vit_n8" in name else {}
        model = timm.create_model(name, num_classes=len(classes), img_size=64, **how)
        about = {"model_args": how, "classes": [*classes], "img_size": [64, 64], "crop_mode": "center", "seed": 0}
        return str(write_checkpoint(tmp_path / file, model, **about))

    return write


def test_links_to_folders_are_followed_where_asked(checkpoint, tmp_path, capsys):
    for place, names in (("data/train", ("cat", "dog")), ("data/val", ("cat", "dog")), (".", ("more",))):
        write_classes(tmp_path / place, names, ["one.png"])
    (tmp_path / "data" / "val" / "cat" / "link").symlink_to(tmp_path / "more")
    model, out = checkpoint("vitrel_vit_n8_none", "a.ckpt", ("cat", "dog")), tmp_path / "out"
    arguments = [model, "--data", str(tmp_path / "data"), "--size", "64", "--protocol", "scale", "--device", "cpu"]
    arguments += ["--attention-n", "0", "--no-report", "--out", str(out)]
    with pytest.warns(UserWarning, match="links to folders: 1 .*vitrel evaluate --follow-links"):
        tool.main(arguments)
    assert pd.read_csv(out / "results.csv")["n"].tolist() == [2]
    with pytest.raises(SystemExit, match=r"another evaluation is in .*number of images: 2 there, 3 now.*--overwrite"):
        tool.main([*arguments, "--follow-links"])
    tool.main([*arguments, "--follow-links", "--overwrite"])
    assert pd.read_csv(out / "results.csv")["n"].tolist() == [3] and "rows: 1, done already: 0" in capsys.readouterr().out


@pytest.mark.slow
def test_files_and_what_is_printed(checkpoint, tmp_path, capsys):
    paths = [checkpoint("vitrel_vit_n8_table", "a.ckpt"), checkpoint("vitrel_vit_n8_none", "b.ckpt")]
    out = tmp_path / "out"
    arguments = ["--data", "shapes", "--size", "64x96", "--n", "4", "--device", "cpu", "--out", str(out)]
    arguments += ["--policy", "clip", "--protocol", "scale", "canvas", "--attention-n", "1", "--no-border-leak", "--no-report"]
    tool.main([*paths, *arguments])
    printed = capsys.readouterr().out
    header = printed.splitlines()[:3]
    assert "vitrel_vit_n8_table (4 classes, trained at 64 px), vitrel_vit_n8_none" in header[0]
    assert header[1] == "on 4 images of shapes at 64x64, 64x96 px, protocol scale and canvas"
    assert header[2] == f"rows: 8, done already: 0; output folder: {out}"
    assert f"open {out / 'report.html'} in a browser" in printed and printed.count("vitrel_vit_n8_none") < 10
    frame = pd.read_csv(out / "results.csv")
    assert len(frame) == 2 * 2 * 2 and set(frame["img_size"]) == {"64x64", "64x96"} and (frame["n"] == 4).all()
    found = read_folder(out)
    assert len(found.rows) == len(found.scores) == 8 and len(found.settings["classes"]) == 4
    assert {"report.html", "images.npz"} < {path.name for path in out.iterdir()}
    tool.main([*paths, *arguments])
    again = capsys.readouterr().out
    assert "rows: 8, done already: 8" in again and pd.read_csv(out / "results.csv").equals(frame)


def test_two_checkpoints_of_one_model_are_told_apart(checkpoint, tmp_path, capsys):
    paths = [checkpoint("vitrel_vit_n8_none", "a.ckpt"), checkpoint("vitrel_vit_n8_none", "b.ckpt")]
    arguments = ["--data", "shapes", "--size", "64", "--n", "4", "--device", "cpu", "--attention-n", "0", "--no-report"]
    tool.main([*paths, *arguments, "--out", str(tmp_path / "out")])
    assert set(pd.read_csv(tmp_path / "out" / "results.csv")["label"]) == {f"vitrel_vit_n8_none ({path})" for path in paths}


def test_mistakes_end_with_one_line(checkpoint, tmp_path, capsys):
    path = checkpoint("vitrel_vit_n8_none", "a.ckpt")
    for arguments, message in [
        ([str(tmp_path / "none.ckpt"), "--data", "shapes", "--size", "64"], "error: no checkpoint at"),
        ([path, "--data", "shapes", "--size", "64", "--policy", "clip"], "no model has the policy 'clip'"),
        ([path, "--data", "shapes", "--size", "64", "--protocol", "zoom"], "unknown protocol 'zoom'"),
        ([path, "--data", str(tmp_path / "no"), "--size", "64"], "no folder .*no: give"),
        ([path, "--data", "shapes", "--size", "64", "4", "--protocol", "scale"], r"evaluation at 4x4, .*at least 8"),
        ([path, path, "--data", "shapes", "--size", "64"], "is given twice: its rows"),
    ]:
        with pytest.raises(SystemExit, match=message):
            tool.main([*arguments, "--device", "cpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        tool.main([path, "--data", "shapes", "--size", "64", "96by128"])
    assert "'96by128' is not an image size: write pixels as 96, or height x width as 160x224" in capsys.readouterr().err


def test_a_plan_is_printed_and_nothing_done(checkpoint, tmp_path, capsys):
    path, out = checkpoint("vitrel_swin_n", "a.ckpt"), tmp_path / "out"
    arguments = [path, "--data", "shapes", "--size", "80", "--n", "8", "--device", "cpu", "--out", str(out)]
    tool.main([*arguments, "--policy", "divisor", "rescale", "clip", "--dry-run"])
    printed = capsys.readouterr().out
    assert "rows: 3, of 8 images each; in" in printed and "5x5 5x5 5x5" in printed and not out.exists()
    assert "the others take about 1 min on this machine" in printed


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    how = dict(embed_dim=48, depth=1, num_heads=3, img_size=32, patch_size=8, num_classes=4)
    path = tmp_path / "weights.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224", **how).state_dict(), path)
    return ["--weights", str(path), "--model-args", "{embed_dim: 48, depth: 1, num_heads: 3, img_size: 32, patch_size: 8}"]


@pytest.mark.slow
def test_a_timm_model_beside_ours(checkpoint, weights, tmp_path):
    out = tmp_path / "out"
    arguments = ["--data", "shapes", "--size", "48", "--n", "6", "--device", "cpu", "--protocol", "scale", "--out", str(out)]
    ours = [checkpoint("vitrel_vit_n8_absolute", "a.ckpt")]
    named = ["vit_tiny_patch16_224", *weights, "--mean", "0.4", "0.5", "0.6", "--attention-n", "2"]
    tool.main([*ours, *named, *arguments, "--translations", "0", "4", "--no-report"])
    frame = pd.read_csv(out / "results.csv")
    timms = frame[frame["model"] == "vit_tiny_patch16_224"]
    assert timms["train_size"].tolist() == ["32x32"] * 3 and timms["resampled_values"].tolist() == [0, 0, 768]
    assert timms["attention_entropy"].notna().all() and set(timms["encoding"]) == {"timm"}
    assert sorted(frame["translation"]) == [0] * 4 + [4] * 2
    assert read_folder(out).settings["models"]["vit_tiny_patch16_224|None"]["mean"] == [0.4, 0.5, 0.6]


OPTIONS = [  # (an option, what it sets, to what)
    (["--mean", "0.1", "0.2", "0.3"], "mean", [0.1, 0.2, 0.3]),
    (["--std", "0.1", "0.2", "0.3"], "std", [0.1, 0.2, 0.3]),
    (["--interpolation", "bilinear"], "interpolation", "bilinear"),
    (["--crop-mode", "squash"], "crop_mode", "squash"),
    (["--crop-pct", "0.5"], "crop_pct", 0.5),
    (["--class-indices", "indices.txt"], "outputs", None),
]


@pytest.mark.slow
def test_preprocessing_and_classes_of_a_run_are_those_of_the_command(checkpoint, tmp_path, monkeypatch):
    """Every option is in the settings, and changes the logits or how they are read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "indices.txt").write_text("left\t1\nright\t0\nabove\t2\nbelow\t3\n")
    write_classes(tmp_path / "photographs" / "val", ("left", "right", "above", "below"), ["0.png", "1.png"], (70, 110))
    arguments = [checkpoint("vitrel_vit_n8_none", "a.ckpt"), "--data", "photographs", "--device", "cpu"]
    arguments += ["--attention-n", "0", "--no-report", "--size", "64"]
    tool.main([*arguments, "--out", "plain"])
    plain = read_folder(tmp_path / "plain")
    for given, name, value in OPTIONS:
        tool.main([*arguments, *given, "--out", name])
        found = read_folder(tmp_path / name)
        assert found.rows[0]["nll"] != plain.rows[0]["nll"], given
        before, after = (folder.settings["models"]["vitrel_vit_n8_none|0"] for folder in (plain, found))
        assert after[name] != before[name], given
        assert value is None or after[name] == value, given


@each(
    ("name", "more", "given"),
    [
        ("export", ["--format", "exported"], ["--img-size", "32"]),
        ("explain", [], ["--model-args", "{depth: 1}"]),
        ("features", ["--data", "shapes"], ["--pretrained"]),
    ],
)
def test_options_for_models_by_name_are_refused_for_a_run_by_other_commands(checkpoint, name, more, given):
    with pytest.raises(SystemExit, match=f"error: {given[0]} is for models by name"):
        command(name).main([checkpoint("vitrel_vit_n8_none", "a.ckpt"), *more, *given])


@pytest.fixture
def damaged(tmp_path):
    """(arguments for 10 images of three classes in a folder, nine of them damaged, with names of other bytes; their paths)."""
    for part, counts in (("train", (1, 1, 1)), ("val", (1, 5, 4))):
        for name, n in zip(("above", "left", "café"), counts, strict=True):
            write_classes(tmp_path / "data" / part, [name], [f"{i}.png" for i in range(n)])
    bad = []
    for path in sorted((tmp_path / "data" / "val").glob("[lc]*/*.png")):
        path.write_bytes(b"no image")
        bad.append(os.path.join(os.fsencode(path.parent), b"=%b\xff.png" % path.stem.encode()))
        os.rename(os.fsencode(path), bad[-1])
    bad.sort()
    model = timm.create_model("vitrel_vit_n8_none", num_classes=3, img_size=32)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    named = ["vitrel_vit_n8_none", "--weights", str(tmp_path / "w.pth"), "--img-size", "32"]
    data = ["--data", str(tmp_path / "data"), "--device", "cpu", "--attention-n", "0", "--no-report"]
    return [*named, *data], [os.fsdecode(path) for path in bad]


def test_images_that_are_left_out_are_named(damaged, tmp_path, capsys):
    """Also where their names are no UTF-8: the bytes are escaped."""
    (arguments, bad), out = damaged, tmp_path / "out"
    tool.main([*arguments, "--size", "48", "--on-bad-image", "count", "--workers", "2", "--out", str(out)])
    printed = capsys.readouterr().out.replace("\n", "")
    names = [name.replace("\udcff", "\\xff") for name in bad]
    assert (pd.read_csv(out / "results.csv")["left_out"] == 9).all()
    found = read_folder(out).settings
    assert found["bad_images"] == names and "café" in found["classes"]
    assert all(name in printed for name in names[:8]) and names[8] not in printed
    assert "and 1 more" in printed and str(out / "settings.json") in printed
    # nothing is made again, and what is known stays known
    tool.main([*arguments, "--size", "48", "--on-bad-image", "count", "--out", str(out)])
    assert names[0] in capsys.readouterr().out and len(read_folder(out).settings["bad_images"]) == 9
    arguments += ["--out", str(tmp_path / "other")]
    for more in (["--size", "48"], ["--size", "20t", "--protocol", "native", "--dry-run"]):
        with pytest.raises(SystemExit, match=r"error: .*cannot decode .*with --on-bad-image count"):
            tool.main([*arguments, *more])


def test_what_is_stopped_says_what_is_saved_and_how_to_go_on(checkpoint, tmp_path, capsys, monkeypatch):
    """By ctrl-c; SIGTERM is asked of `vitrel compare`."""
    path, out, left = checkpoint("vitrel_vit_n8_none", "a.ckpt"), tmp_path / "out", [2]
    measured = run._share

    def stopped(*given):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGINT)
        return measured(*given)

    monkeypatch.setattr(run, "_share", stopped)
    requested = [path, "--data", "shapes", "--device", "cpu", "--n", "4", "--size", "80", "96", "--out", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts processes in the background without it
    try:
        with pytest.raises(SystemExit) as caught:
            tool.main([*requested, "--attention-n", "0"])
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 130
    assert f"rows in {out}: 2; the same command measures the others" in said
    assert len(read_rows(out)[0]) == 2 and not list(out.glob("**/.*.part"))
