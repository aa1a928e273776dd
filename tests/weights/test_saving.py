"""save and load: every vitrel model is the same after them, anyone's weights become one, what cannot be kept is refused."""

import json
import re
import tempfile
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn

import vitrel
from helpers import each
from helpers.small_runs import fit, small
from helpers.timm_peers import apart, peer
from helpers.variants import SMALL as FEW
from helpers.variants import VARIANTS
from vitrel.cli import main
from vitrel.models.config import PREPROCESSING
from vitrel.models.swin import Swin
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS, create_position
from vitrel.weights import absolute_to_relative, drop_absolute

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SWIN = dict(img_size=32, patch_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=5)
THEIRS = dict(depth=2, embed_dim=64, num_heads=1, img_size=48, num_classes=5)


OPTIONS = [(key, options) for key, options in VARIANTS if options or POSITIONS[key].policies]  # the rows have the others


def scatter(model):
    """Every parameter far from its initialization."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


def images(model):
    like, (h, w) = model.patch_embed.proj.weight, model.img_size
    return [torch.randn(1, like.shape[1], *size).to(like.dtype) for size in ((h, w), (h // 2 + 3, w + 9))]


@torch.no_grad()
def assert_equal(again, model):
    """Bit by bit, at the native size and at one that is not square."""
    assert type(again) is type(model) and not again.training
    ours, theirs = model.state_dict(), again.state_dict()
    assert [*ours] == [*theirs] and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True)
    )
    assert again.img_size == model.img_size
    for image in images(model):
        assert torch.equal(again(image), model(image))


def round_trip(model, tmp_path):
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "model.safetensors"
    vitrel.save(model, path)
    again = vitrel.load(path)
    assert_equal(again, model.eval())
    return again


ROWS = ["vitrel_swinv2_n", *timm.list_models("vitrel_vit_n8_*"), *timm.list_models("vitrel_swin_n*")[::4]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_row(name, tmp_path):
    again = round_trip(scatter(timm.create_model(name, num_classes=3)), tmp_path)
    assert again.pretrained_cfg["architecture"] == name


@pytest.mark.slow
@each(("key", "options", "trunk"), [(*case, ViT) for case in OPTIONS] + [(*case, Swin) for case in OPTIONS[::6]])
def test_every_encoding(key, options, trunk, tmp_path):
    position_args = FEW.get(key, {}) | options
    if POSITIONS[key].site == "attention" and POSITIONS[key].policies:
        position_args |= dict(policy=POSITIONS[key].policies[-1]) if not {"policy", "reference"} & {*options} else {}
    sizes = VIT | dict(img_size=(32, 48)) if trunk is ViT else SWIN
    round_trip(scatter(trunk(**sizes, position=key, position_args=position_args or None)), tmp_path)


def ours(name="vitrel_vit_n8_table", **options):
    return scatter(timm.create_model(name, **dict(num_classes=5) | options))


def small_peer(name, **own):
    return peer(name, **THEIRS | own)


def called(model, method, *args, **options):
    getattr(model, method)(*args, **options)
    return model


def faded(steps):
    model = vitrel.relativize(small_peer("vit_base_patch16_224"), absolute="fade", fade_steps=4).train()
    for _ in range(steps):
        model(torch.randn(1, 3, 48, 48))
    return drop_absolute(model) if steps == 4 else model


ROUTES = {
    **{name: (lambda name=name: vitrel.from_timm(small_peer(name))) for name in (
        "vit_base_patch16_224", "deit_tiny_distilled_patch16_224", "vit_base_patch16_siglip_224", "vit_small_patch16_dinov3",
        "vit_relpos_medium_patch16_cls_224")},
    "beit": lambda: vitrel.from_timm(small_peer("beit_base_patch16_224", use_rel_pos_bias=False,
        use_shared_rel_pos_bias=True)),
    "sam": lambda: vitrel.from_timm(small_peer("samvit_base_patch16_224", global_attn_indexes=(1,), window_size=3)),
    "swin": lambda: vitrel.from_timm(peer("swin_tiny_patch4_window7_224")),
    "swinv2": lambda: vitrel.from_timm(peer("swinv2_base_window12to16_192to256")),
    "relativize keep": lambda: scatter(vitrel.relativize(small_peer("vit_base_patch16_224"), "table+shaw", img_size=(48, 80))),
    "relativize drop": lambda: scatter(vitrel.relativize(small_peer("eva02_base_patch14_224", img_size=42),
        absolute="drop", rope="drop")),
    "relativize rope kept": lambda: scatter(vitrel.relativize(small_peer("vit_small_patch16_rope_ape_224"), "t5",
        dict(num_buckets=8))),
    "fade begun": lambda: faded(1), "faded": lambda: faded(4),
    "absolute_to_relative": lambda: absolute_to_relative(scatter(ViT(**VIT)), torch.randn(4, 3, 32, 32)),
    "absolute_to_relative fade": lambda: absolute_to_relative(scatter(ViT(**VIT)), torch.randn(4, 3, 32, 32),
        absolute="fade", fade_steps=3),
    "pruned": lambda: called(ours(drop_path_rate=0.2), "prune_intermediate_layers", [0], prune_norm=True, prune_head=True),
    "pruned, norm alone": lambda: called(ours(global_pool="avg"), "prune_intermediate_layers", [0], prune_norm=True,
        prune_head=False),
    "pruned Swin": lambda: called(ours("vitrel_swin_n", drop_path_rate=0.2), "prune_intermediate_layers", [0],
        prune_norm=True, prune_head=True),
    "pruned Swin, all stages": lambda: called(ours("vitrel_swin_n"), "prune_intermediate_layers", [2], prune_norm=True,
        prune_head=False),
    "other head": lambda: called(ours(), "reset_classifier", 9, "avg"),
    "other head, Swin": lambda: called(ours("vitrel_swinv2_n"), "reset_classifier", 9, "max"),
    "norm and pooling": lambda: called(ours(global_pool="avg"), "reset_classifier", 9, "token"),
    "map to token": lambda: called(ours(global_pool="map"), "reset_classifier", 2, "token"),
    "distilled, no head": lambda: called(vitrel.from_timm(small_peer("deit_tiny_distilled_patch16_224")),
        "reset_classifier", 0, ""),
    "no classes": lambda: ours(num_classes=0), "no head": lambda: called(ours(), "reset_classifier", 0, ""),
    "bfloat16": lambda: ours("vitrel_swin_n").bfloat16(),
    "input size": lambda: called(ours(), "set_input_size", (96, 40)),
    "policy": lambda: called(ours(), "set_position_options", policy="clip"),
    "checkpointing": lambda: called(ours("vitrel_swin_n"), "set_grad_checkpointing"),
    "shared": lambda: ours(share_position=True), "one channel": lambda: ours(in_chans=1),
    "windows": lambda: scatter(timm.create_model("vitrel_vit", **VIT, class_token=False, global_pool="avg",
        position="decomposed", block_args=dict(window=3, global_blocks=(1,)))),
    "perturbed": lambda: ours("vitrel_vit_n8_rope_axial", position_args=dict(shift_coords=0.1, jitter_coords=1.1,
        rescale_coords=1.2)),
    "log_n": lambda: ours("vitrel_vit_n8_rope_axial", position_args=dict(temperature="log_n")),
    "Swin options": lambda: ours("vitrel_swinv2_n", position_args=dict(pretrained_window=(2, 3, 4)), window_size=(4, 6),
        drop_path_rate=0.3),
    "everything": lambda: scatter(timm.create_model("vitrel_vit", **VIT | dict(mlp_ratio=3.3), reg_tokens=2,
        position="absolute+rope_mixed+table", init_gain=1.0, drop_rate=0.1,
        attn_drop_rate=0.2, block_args=dict(init_values=0.1, mlp="swiglu", mlp_norm=True, qk_norm=True, attn_norm=True,
            norm_eps=1e-3))),
    "names of classes": lambda: ours(
        pretrained_cfg_overlay=dict(mean=(0.1, 0.2, 0.3), crop_mode="squash", label_names=["a", "b", "c", "d", "e"])),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_every_route(route, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrel.weights.fit.STEPS", 3)
    model = ROUTES[route]()
    again = round_trip(model, tmp_path)
    kept = [[x.pretrained_cfg.get(name) for name in (*PREPROCESSING, "label_names")] for x in (model, again)]
    assert json.dumps(kept[0]) == json.dumps(kept[1])
    drops = [[getattr(m, "p", getattr(m, "drop_prob", 0)) for m in x.modules()] for x in (model, again)]
    assert drops[0] == pytest.approx(drops[1])
    assert again.current_arguments() == model.current_arguments()


def test_mixed_types(tmp_path):
    model = ours().bfloat16()
    model.head.float()
    vitrel.save(model, tmp_path / "model.safetensors")
    again, image = vitrel.load(tmp_path / "model.safetensors"), images(model)[1].float()
    assert [p.dtype for p in again.parameters()] == [p.dtype for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(image), again(image))


THROUGH_TIMM = ["deit_tiny_distilled_patch16_224", "swinv2", "fade begun", "windows", "everything", "policy"]


@pytest.mark.slow
@pytest.mark.parametrize("route", THROUGH_TIMM)
def test_through_timms_folder(route, tmp_path):
    model = ROUTES[route]().eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    for again in (timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval(), vitrel.load(tmp_path)):
        for image in images(model):
            assert torch.equal(again(image), model(image))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eva02_base_patch14_224", "swin_tiny_patch4_window7_224"])
def test_files_of_timm(name, tmp_path):
    """A folder of timm's, and a .pth beside its config.json."""
    theirs = peer(name, **(dict(num_classes=5) if "swin" in name else THEIRS | dict(img_size=56 if "14" in name else 48)))
    save_for_hf(theirs, tmp_path, safe_serialization=True)
    image = torch.randn(1, 3, *theirs.patch_embed.img_size)
    again = vitrel.load(tmp_path)
    assert isinstance(again, ViT | Swin) and apart(again(image), theirs(image)) <= 2e-6
    with pytest.raises(ValueError, match=f"is of the model {name}, not of {TI}"):
        vitrel.load(tmp_path, like=TI)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "any.pth")
    assert torch.equal(vitrel.load(tmp_path / "any.pth")(image), again(image))
    round_trip(again, tmp_path)


TI = "vit_tiny_patch16_224"


def test_bare_weights_of_ours(tmp_path):
    for name in ("vitrel_vit_n8_rope_mixed", "vitrel_swin_n"):
        model = ours(name)
        save_file(model.state_dict(), tmp_path / "bare.safetensors")
        assert_equal(vitrel.load(tmp_path / "bare.safetensors", like=name), model)


@pytest.mark.slow
def test_bare_weights_need_a_name(tmp_path):
    own = dict(depth=3, embed_dim=96, num_heads=3)
    save_file(small_peer(TI, **own).state_dict(), path := tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match=r"bare\.safetensors holds weights without .* like='vit.*first names are blocks"):
        vitrel.load(path)
    with pytest.raises(ValueError, match=r"unknown model 'vit_tiny'"):
        vitrel.load(path, like="vit_tiny")
    for like in ("vitrel_swin_n", TI):
        with pytest.raises(ValueError, match=rf"bare\.safetensors does not fit {like}.*first .* are blocks"):
            vitrel.load(path, like=like)
    assert vitrel.load(path, like=TI, **own, global_pool="avg", fc_norm=False).global_pool == "avg"
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"bare\.safetensors"):
        vitrel.load(path, like=TI)


def test_runs(tmp_path):
    """A checkpoint of vitrel train, and the folder of the run."""
    (tmp_path / "checkpoints").mkdir()
    run = small("vitrel_vit_n8_table")
    fit(run, max_epochs=1).save_checkpoint(path := tmp_path / "checkpoints" / "last.ckpt")
    for source in (path, tmp_path):
        assert_equal(vitrel.load(source), run.model.eval())
    round_trip(vitrel.load(path), tmp_path)
    for source, like in ((path, "vitrel_vit_n8_none"), (path, TI), (tmp_path, TI)):
        with pytest.raises(ValueError, match=rf"last\.ckpt is of the model vitrel_vit_n8_table, not of {like}: give that name"):
            vitrel.load(source, like=like)
    loaded = torch.load(path)
    del loaded["vitrel"]["model_args"]
    torch.save(loaded, tmp_path / "cut.ckpt")
    with pytest.raises(ValueError, match=r"cut\.ckpt is damaged: its entry 'vitrel' has no model_args"):
        vitrel.load(tmp_path / "cut.ckpt")
    changed = vitrel.load(tmp_path, num_classes=9, drop_path_rate=0.1)
    assert changed.head.out_features == 9 and torch.equal(changed.blocks[1].mlp.fc1.weight, run.model.blocks[1].mlp.fc1.weight)


def test_a_folder_of_timm_that_holds_code_is_refused(tmp_path):
    save_for_hf(model := ours(), tmp_path, safe_serialization=False)
    torch.save(model, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .* was refused"):
        vitrel.load(tmp_path)


@pytest.mark.slow
def test_changes(tmp_path):
    model = ours("vitrel_vit_n8_absolute_rope_mixed", num_classes=5)
    vitrel.save(model, path := tmp_path / "model.safetensors")
    new = vitrel.load(path, num_classes=8)
    assert new.num_classes == 8 and new(torch.randn(1, 3, 64, 64)).shape == (1, 8)
    assert torch.equal(new.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
    larger, image = vitrel.load(path, img_size=(96, 48)), torch.randn(1, 3, 96, 48)
    assert larger.img_size == (96, 48) and larger.pos_embed.pos_embed.shape[1] == 1 + 12 * 6
    assert apart(larger(image), model(image)) <= 2e-6  # which resamples at forward
    dropped = vitrel.load(path, drop_path_rate=0.4, drop_rate=0.2)
    assert dropped.head_drop.p == 0.2 and dropped.blocks[-1].drop_path1.drop_prob == pytest.approx(0.4)
    assert torch.equal(dropped(image), model(image))
    round_trip(new, tmp_path), round_trip(dropped, tmp_path)
    with pytest.raises((TypeError, ValueError), match="nothing_of_ours"):
        vitrel.load(path, nothing_of_ours=3)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        vitrel.load(path, mlp_ratio=2.0)


def altered(change, name="vitrel_vit_n8_absolute_rope_mixed", **options):
    model = ours(name, **options)
    return change(model) or model


SITE = "vitrel_vit_n8_rope_axial"
LOST = {  # what a file would not give back: (model, words)
    "head, other width": (lambda: altered(lambda m: setattr(m, "head", nn.Linear(m.embed_dim, 11))), "head"),
    "MLP": (lambda: altered(lambda m: setattr(m.blocks[1], "mlp", nn.Identity())), r"blocks\.1\.mlp"),
    "base": (lambda: altered(lambda m: setattr(m.blocks[0].position, "base", 7.0), SITE), r"blocks\.0\.position.*base"),
    "other encoding": (
        lambda: altered(lambda m: setattr(m.blocks[0], "position", create_position("alibi", (8, 8, 1), 2, 32)), SITE),
        r"blocks\.0",
    ),
    "block": (lambda: altered(lambda m: void(m.blocks.append(m.blocks[0]))), r"blocks"),
    "parametrized": (
        lambda: altered(lambda m: void(nn.utils.parametrizations.weight_norm(m.blocks[0].attn.proj))),
        r"blocks\.0\.attn\.proj",
    ),
    "parallel": (lambda: nn.DataParallel(ours()), "DataParallel"),
    "of timm": (lambda: small_peer(TI, num_heads=1), "VisionTransformer.*from_timm"),
}


def void(_):
    """For calls that return something where a change returns None."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LOST)
def test_what_cannot_be_kept_is_refused(case, tmp_path):
    build, words = LOST[case]
    with pytest.raises(ValueError, match=words):
        vitrel.save(build(), tmp_path / "model.safetensors")
    assert [*tmp_path.iterdir()] == []


def test_a_model_that_keeps_timms_trunk_goes_the_way_that_the_message_says(tmp_path):
    torch.save(timm.create_model("levit_128s").state_dict(), tmp_path / "timm.pth")
    command = ["convert", "levit_128s", "--weights", str(tmp_path / "timm.pth"), "--out", str(tmp_path / "a.safetensors")]
    with pytest.raises(SystemExit, match=r"LevitDistilled keeps timm's trunk.*state_dict.*from_timm\(NAME, checkpoint_path"):
        main(command)
    model, image = vitrel.from_timm("levit_128s", checkpoint_path=tmp_path / "timm.pth").eval(), torch.randn(1, 3, 96, 128)
    torch.save(model.state_dict(), tmp_path / "ours.pth")
    again = vitrel.from_timm("levit_128s", checkpoint_path=tmp_path / "ours.pth").eval()
    assert torch.equal(again(image), model(image))


def test_names_of_files(tmp_path):
    for name in ("model.pth", "model", "model.safetensors.gz"):
        with pytest.raises(ValueError, match=rf"saved as \.safetensors, not as {re.escape(name)}"):
            vitrel.save(ours(), tmp_path / name)
    with pytest.raises(OSError, match="No such file"):
        vitrel.save(ours(), tmp_path / "missing" / "model.safetensors")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        vitrel.load(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        vitrel.load(tmp_path)


def with_metadata(change):
    """Return a function that changes the metadata of a file and keeps its tensors."""

    def damage(path):
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["vitrel"])
        about = change(about) or about
        save_file(load_file(path), path, metadata={"vitrel": about if isinstance(about, str) else json.dumps(about)})

    return damage


def without(path):
    metadata = {name: value for name, value in meta_of(path).items() if name != "crc32"}
    save_file({name: value for name, value in load_file(path).items() if name != "norm.weight"}, path, metadata=metadata)


def meta_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


DAMAGES = {
    "header": (lambda path: path.write_bytes(path.read_bytes()[:40]), ""),
    "newer": (with_metadata(lambda a: a.update(format=99)), "format 99.*upgrade"),
    "no configuration": (with_metadata(lambda a: void(a.pop("model"))), "like="),
    "cut JSON": (with_metadata(lambda a: json.dumps(a)[:-9]), ""),
    "no arguments": (with_metadata(lambda a: void(a["model"].pop("arguments"))), ""),
    "other depth": (with_metadata(lambda a: a["model"]["arguments"].update(depth=3)), ""),
    "a tensor is missing": (without, "norm.weight"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage, tmp_path):
    vitrel.save(ours(), path := tmp_path / "model.safetensors")
    change, words = DAMAGES[damage]
    change(path)
    with pytest.raises(ValueError, match=rf"(?s)model\.safetensors.*{words}"):
        vitrel.load(path)


def test_bare_weights_are_prepared_as_the_model_they_are_like(tmp_path):
    theirs = timm.create_model("deit_tiny_patch16_224", depth=1, num_classes=3, img_size=32)
    torch.save(theirs.state_dict(), tmp_path / "deit.pth")
    cfg = vitrel.load(tmp_path / "deit.pth", like="deit_tiny_patch16_224", depth=1).pretrained_cfg
    assert (cfg["mean"], cfg["crop_pct"]) == (theirs.pretrained_cfg["mean"], theirs.pretrained_cfg["crop_pct"])
    assert cfg["input_size"] == (3, 32, 32)
