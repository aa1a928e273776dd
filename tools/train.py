"""Train a model: `python tools/train.py fit --config configs/train_imagefolder.yaml`.

`--ckpt_path RUN/checkpoints/last.ckpt` goes on with an interrupted run; `--KEY VALUE` overrides a key of the file.
"""

from vitrel.train import run

if __name__ == "__main__":
    run()
