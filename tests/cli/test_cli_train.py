import csv
import os
import re
import shlex
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers import each, printed_commands
from helpers.pictures import write_classes
from helpers.runs import at, in_child, on_two, read, status
from vitrel import cli
from vitrel.cli.train import expanded
from vitrel.common.extras import install_command
from vitrel.common.lock import LOCK
from vitrel.train import run
from vitrel.train.running import command

ROOT = Path(__file__).parents[2]
SHORT = [
    "--model.model=vitrel_vit_n8_none",
    "--model.model_args={depth: 1}",
    "--model.optim.warmup_epochs=0",
    "--data.data=shapes",
    "--data.size=64",
    "--data.batch_size=8",
    "--data.n_train=16",
    "--data.n_val=8",
    "--trainer.max_epochs=1",
    "--trainer.accelerator=cpu",
]


@each(
    ("given", "recipe", "keys"),
    [
        (["--model", "deit", "--pretrained", "--data=flowers"], "finetune",
         ["--model.model=deit", "--model.tuning.pretrained=true", "--data.data=flowers"]),
        (["--weights", "a.pth", "--size", "160x96"], "finetune",
         ["--model.tuning.init_from=a.pth", "--data.size=[160, 96]"]),
        (["--data", "flowers", "--size=160x96", "--epochs", "3"], "scratch",
         ["--data.data=flowers", "--data.size=[160, 96]", "--trainer.max_epochs=3"]),
        (["--pretrained", "--protocol", "native", "--size=196t"], "finetune",
         ["--model.tuning.pretrained=true", "--data.protocol=native", "--data.tokens=196"]),
        (["--model", "deit", "--pretrained", "--position", "table", "--fit", "64", "--distill"], "distill",
         ["--model.model=deit", "--model.tuning.pretrained=true", "--model.tuning.position=table",
          "--model.tuning.fit=64", "--model.objective.distillation.alpha=1.0",
          "--model.objective.distillation.labels=false"]),
        (["--pretrained", "--distill", "features", "--size", "160"], "position_free",
         ["--model.tuning.pretrained=true", "--model.objective.distillation.alpha=1.0",
          "--model.objective.distillation.labels=false", "--model.objective.distillation.features={}", "--data.size=160"]),
        (["--distill=logits", "--pretrained"], "distill",
         ["--model.objective.distillation.alpha=1.0", "--model.objective.distillation.labels=false",
          "--model.tuning.pretrained=true"]),
        (["--data.protocol=native", "--data.size", "64t", "--epochs=3"], "scratch",
         ["--data.protocol=native", "--data.tokens=64", "--trainer.max_epochs=3"]),
        (["--pretrained", "--task", "segmentation"], "segmentation",
         ["--model.tuning.pretrained=true", "--model.task=segmentation"]),
        (["--pretrained", "--task", "multilabel"], "finetune",
         ["--model.tuning.pretrained=true", "--model.task=multilabel"]),
        (["--data", "shapes"], "scratch", ["--data.augment=null", "--data.data=shapes"]),
        (["--data", "flowers", "--lr=1e-3", "--batch-size", "32", "--n-train", "200", "--seed=3"], "scratch",
         ["--data.data=flowers", "--model.optim.lr=1e-3", "--data.batch_size=32", "--data.n_train=200",
          "--seed_everything=3", "--model.optim.lr_base_size=null"]),
        (["--config", "mine.yaml", "--position", "table"], "", ["--config=mine.yaml", "--model.tuning.position=table"]),
        (["--model.model=deit", "--data.size=64"], "", ["--model.model=deit", "--data.size=64"]),
    ],
)  # fmt: skip
def test_short_options_are_keys_behind_a_recipe(given, recipe, keys):
    found = expanded(given)
    if recipe:
        config = found.pop(0)
        assert config.startswith("--config=") and Path(config.partition("=")[2]).is_file() and Path(config).stem == recipe
    assert found == keys


def test_a_folder_of_a_run_is_fine_tuned(tmp_path):
    assert Path(expanded(["--model", str(tmp_path), "--data", "flowers"])[0]).stem == "finetune"


def offline(*args, hook=None):
    """`vitrel train` in a forked process to which the network is refused, after `hook`; its exit status."""

    def prepare():
        def refuse(*args, **kwargs):
            raise AssertionError(f"the code tried to reach {args[-1]!r}")

        socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
        os.chdir(ROOT)
        if hook is not None:
            hook()

    return status(in_child(["train", *args], prepare, cli.main))


@pytest.mark.slow
def test_shapes_from_the_command_line(tmp_path, capfd):
    done = offline(*SHORT, f"--trainer.default_root_dir={tmp_path}")
    said = capfd.readouterr()
    assert done == 0, said.err
    assert (tmp_path / "checkpoints" / "best.ckpt").is_file() and (tmp_path / "metrics.csv").is_file()
    seen = r"images/s \d+  data wait \d+%  eta 0:00:00"
    first, second, update, epoch, best, _, _ = said.out.splitlines()
    assert first.startswith("vitrel_vit_n8_none, ") and "4 classes, at 64 px" in first
    assert second == f"16 training and 8 evaluation images of shapes; epochs: 1, written to {tmp_path}"
    assert update == "updates of 8 images: 1 device, batches of 8, 1 accumulated; learning rate 0.001"
    assert re.fullmatch(rf"epoch 1/1  loss \S+  top1 \S+  val loss \S+  val top1 \S+  {seen}", epoch)
    assert f"{tmp_path}/checkpoints/best.ckpt" in best
    [args] = printed_commands(said.out)
    assert args.models == [str(tmp_path)]


LONGER = ["--trainer.max_epochs=4", "--run.save_every=1"]


@pytest.mark.slow
def test_ctrl_c_prints_the_command_that_goes_on(tmp_path, capfd):
    def hook():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        at(6, signal.SIGINT)()

    assert offline(*SHORT, *LONGER, "--ckpt_path=auto", f"--trainer.default_root_dir={tmp_path}", hook=hook) == 130
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    [line] = [line for line in said.out.splitlines() if line.startswith("ctrl-c: ")]
    assert f"saved {tmp_path}/checkpoints/last.ckpt (update 6); resume with: vitrel train " in line
    words = shlex.split(line.partition("resume with: ")[2])
    assert words[-1] == "--ckpt_path=auto" and sum("ckpt_path" in word for word in words) == 1
    assert offline(*words[2:]) == 0
    assert read(tmp_path / "checkpoints" / "last.ckpt")["vitrel"]["step"] == 8


class Interrupting(ModuleType):
    """A module during whose import ctrl-c is pressed."""

    def __getattr__(self, name):
        raise KeyboardInterrupt


def test_ctrl_c_while_it_starts_is_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vitrel.train", Interrupting("vitrel.train"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *SHORT, f"--trainer.default_root_dir={tmp_path}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 130 and len(error.splitlines()) == 1 and "ctrl-c" in error


@pytest.mark.slow
@each(
    ("extra", "text"),
    [
        (["--trainer.accelerator=gpu", "--trainer.devices=64"], "gpu"),
        (["--trainer.overfit_batches=-1"], "overfit_batches"),
        (["--trainer.accumulate_grad_batches=0"], "^trainer.accumulate_grad_batches must be at least 1, not 0$"),
        (["--data.workers=-1"], "^data.workers must be at least 0, not -1$"),
    ],
)
def test_what_the_trainer_refuses_is_one_line(tmp_path, extra, text):
    with pytest.raises(ValueError, match=text) as said:
        run(["fit", *SHORT, *extra, f"--trainer.default_root_dir={tmp_path}"])
    assert "\n" not in str(said.value)


def test_only_the_first_rank_asks_whether_the_folder_is_used(tmp_path, monkeypatch):
    """Another that starts later would find the checkpoint that the first has begun to write."""
    from lightning.pytorch.utilities import rank_zero_only

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    started = []
    monkeypatch.setattr(command.TrainCLI, "_fit", lambda self, *_: started.append(self.trainer.global_rank))
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for rank in "10":
        for name, value in {**torchrun, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "x"}.items():
            monkeypatch.setenv(name, value)
        arguments = ["fit", *SHORT, f"--trainer.default_root_dir={tmp_path}", "--trainer.devices=2", "--trainer.strategy=ddp"]
        if rank == "1":
            command.run(arguments)
        else:
            with pytest.raises(FileExistsError, match="holds a run already"):
                command.run(arguments)
    assert started == [1]


@pytest.mark.slow
def test_two_processes_leave_one_folder(tmp_path, capfd):
    """Started as by torchrun; those that Lightning starts are above."""
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=2"]
    assert on_two(["train", *SHORT, *two, f"--trainer.default_root_dir={tmp_path}"], main=cli.main) == [0, 0]
    said = capfd.readouterr()
    assert "sync_dist" not in said.err
    assert [line.split("  ")[0] for line in said.out.splitlines() if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    names = {LOCK, "checkpoints", "config.yaml", "metrics.csv", "tensorboard"}
    assert {path.name for path in tmp_path.iterdir()} == names
    saved = read(tmp_path / "checkpoints" / "last.ckpt")["vitrel"]
    assert (saved["epoch"], saved["step"]) == (2, 2)  # 16 images in batches of 2 × 8
    with (tmp_path / "metrics.csv").open() as file:
        assert sum(row["val/top1"] != "" for row in csv.DictReader(file)) == 2


@pytest.mark.slow
def test_a_loss_that_is_not_finite_exits_non_zero(tmp_path, capfd):
    assert offline(*SHORT, f"--trainer.default_root_dir={tmp_path}", "--model.optim.lr=1e38", "--trainer.max_epochs=3") == 1
    said = capfd.readouterr().err
    assert re.match(r"error: loss is not finite at epoch \d, batch \d+ \(update \d+\): stopped\. .* Lower model.optim.lr", said)
    assert "Traceback" not in said


@pytest.mark.slow
@each(
    ("text", "said"),
    [
        ("data: {seed: 3}", "leave out data.seed: it is set from seed_everything"),
        ("model: {num_classes: 3}", "leave out model.num_classes: it is set from data.data"),
        ("run: 7", "run takes keys, not 7"),
    ],
)
def test_what_jsonargparse_would_ignore_is_refused(tmp_path, text, said):
    (tmp_path / "config.yaml").write_text(text)
    for given in (["--config", f"{tmp_path}/config.yaml"], [f"-c={tmp_path}/config.yaml"]):
        with pytest.raises(ValueError, match=rf"config\.yaml: {said}"):
            run(["fit", *SHORT, *given])


@each(
    ("options", "text"),
    [
        (["--size", "224,224"], "argument --size: '224,224' is not an image size: write pixels as 96, or height x width as"),
        (["--data.size=224,224"], "argument --data.size: '224,224' is not an image size"),
        (["--batch-size=0"], "argument --batch-size: '0' is no count of 1 or more"),
        (["--lr", "fast"], "model.optim.lr must be float, not 'fast'"),
        (["--config", "gone.yaml"], "no file gone.yaml for --config"),
        (["--epochs"], "argument --epochs: '' is no count of 1 or more"),
        (["--distill", "feature"], "argument --distill: 'feature' is none of logits, features"),
        (["--model.optim.lr"], "argument --model.optim.lr: expected one argument"),
        (["--model.mixing=3"], "model.mixing must be one of Mixing, null, not '3'"),
    ],
)
def test_bad_usage_is_one_line_as_of_other_subcommands(options, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--model", "vitrel_vit_n8_none", "--data", "shapes", *options])
    [line] = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith(f"vitrel train: error: {text}")


@pytest.mark.slow
@each(
    ("options", "text"),
    [
        (["--model", "vitrel_vit_n8_tables"], "unknown model 'vitrel_vit_n8_tables'; nearest: vitrel_vit_n8_table"),
        (["--model.model_args={dpth: 2}"], "wrong argument of the model vitrel_vit_n8_none: .*dpth.*did you mean 'depth'"),
        (["--position", "table", "--model.model_args={dpth: 2}"], "vitrel_vit_n8_none cannot have model.model_args.*dpth"),
        (["--data", "gone"], "no folder gone: give"),
    ],
)
def test_bad_settings_are_one_line_as_of_other_subcommands(tmp_path, options, text):
    with pytest.raises(SystemExit, match=f"^error: {text}") as stopped:
        cli.main(["train", "--model", "vitrel_vit_n8_none", "--data", "shapes", "--out", str(tmp_path / "run"), *options])
    assert "\n" not in stopped.value.code and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, capfd):
    """One that a run needs after it has begun; others: test_cli.py."""
    module = "albumentations"
    for split in ("train", "val"):
        write_classes(tmp_path / split, "ab", [f"{i}.png" for i in range(8)], (32, 32))

    def hook():
        for name in [*sys.modules]:
            if name.startswith((module, "vitrel", "lightning", "torch.utils.tensorboard")):
                del sys.modules[name]
        sys.modules[module] = None  # as if it were not installed
        cli.main(["train", "--data", str(tmp_path), "--model", "vitrel_vit_n8_none", "--out", str(tmp_path / "run"), *SMALL])

    assert status(in_child(None, main=lambda _: hook())) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line == f"error: {module} is not installed: {install_command('train')}"


SMALL = ["--size=32", "--epochs=1", "--data.workers=0", "--trainer.accelerator=cpu"]
