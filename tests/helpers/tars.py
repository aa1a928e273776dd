"""Image folders as tar files: of class folders, and as WebDatasets."""

import io
import tarfile
from pathlib import Path


def add(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def write_tars(folder, out):
    """Write folder/{train,val} as out/train.tar and out/val.tar, as `tar -cf out/train.tar -C folder/train .` does."""
    Path(out).mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        with tarfile.open(Path(out) / f"{split}.tar", "w", format=tarfile.GNU_FORMAT) as archive:
            archive.add(Path(folder) / split, ".")


def write_shards(folder, out, images_per_tar=100):
    """Write folder/{train,val}/<class>/* as a WebDataset, out/{train,val}/00000.tar, ..., with classes.txt."""
    classes = sorted(path.name for path in (Path(folder) / "train").iterdir())
    for split in ("train", "val"):
        paths = sorted(path for path in (Path(folder) / split).glob("*/*") if path.is_file())
        (Path(out) / split).mkdir(parents=True, exist_ok=True)
        for number, start in enumerate(range(0, len(paths), images_per_tar)):
            with tarfile.open(Path(out) / split / f"{number:05d}.tar", "w") as archive:
                for i, path in enumerate(paths[start : start + images_per_tar], start):
                    add(archive, f"{i:06d}{path.suffix}", path.read_bytes())
                    add(archive, f"{i:06d}.cls", str(classes.index(path.parent.name)).encode())
    (Path(out) / "classes.txt").write_text("\n".join(classes) + "\n")
