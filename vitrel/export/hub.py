"""push_to_hub: upload a model, its configuration and a card with its scores at many sizes to the Hugging Face hub."""

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import ModelCard, ModelCardData, create_repo, upload_folder
from huggingface_hub.utils import validate_repo_id
from torch import nn

from vitrel.common.sizes import format_size
from vitrel.export.write import export_model
from vitrel.models.backbone import backbone_of
from vitrel.models.segmenter import Segmenter
from vitrel.weights.record import state_hash
from vitrel.weights.saving import save

_TIMM = """
```python
import timm, vitrel  # vitrel registers its models with timm

model = timm.create_model("hf-hub:{repository}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

or, with the training sizes and the grids of its tables:
"""
_CARD = """---
{data}
---

# {name}

A {kind} of vitrel with the position encoding `{position}`, for images of any height and width. {outputs}

## Use
{timm}
```python
import vitrel
from huggingface_hub import hf_hub_download

model = vitrel.load(hf_hub_download("{repository}", "model.safetensors"))
```
"""


class OtherWeights(ValueError):
    """Raised where the evaluation given for a model's card is of other weights than the model's."""


def push_to_hub(model: nn.Module, repository: str, evaluation: str | Path | None = None, private: bool = False) -> str:
    """Upload a model to the Hugging Face hub as one commit, and return the address of the repository.

    Users load it by `timm.create_model("hf-hub:OWNER/NAME", pretrained=True)` after `import vitrel`, as its card says. The card
    is written anew with each upload, so that its scores are those of the weights; older ones stay in the repository's history.
    The token is that of `hf auth login` or HF_TOKEN.

    Args:
        model: as for `write_hub_folder`.
        repository: "OWNER/NAME", created if it does not exist.
        evaluation: as for `write_hub_folder`.
        private: create it as a private repository; one that exists stays as it is.

    Raises:
        ValueError: the name is no "OWNER/NAME"; others as from `write_hub_folder`.
        ConnectionError: the hub cannot be reached, or refuses the upload; the message has its reason.
    """
    check_repository(repository)
    with TemporaryDirectory() as parent:
        folder = write_hub_folder(model, Path(parent) / "model", repository, evaluation)
        try:
            address = create_repo(repository, private=private or None, exist_ok=True)
            upload_folder(repo_id=repository, folder_path=folder, commit_message="Add model")
        except Exception as error:  # of the library and its HTTP client, of many classes
            raise ConnectionError(
                f"{repository} was not uploaded: {error}\nlog in by `hf auth login` or set HF_TOKEN, and unset HF_HUB_OFFLINE"
            ) from error
    return str(address)


def check_repository(name: str) -> None:
    """Raise ValueError unless `name` can be that of a repository on the hub, "OWNER/NAME"; nothing is asked of the hub."""
    if name.count("/") != 1:
        raise ValueError(f"{name!r} is no repository of the hub: write OWNER/NAME")
    validate_repo_id(name)


def write_hub_folder(model: nn.Module, folder: Path, repository: str, evaluation: str | Path | None = None) -> Path:
    """Write the folder that `push_to_hub` uploads: model.safetensors, README.md, and config.json for timm; return its path.

    Args:
        model: a ViT or Swin of vitrel as `vitrel.export.export_model` takes it, or a Segmenter, which only vitrel reads (no
            config.json); in evaluation mode.
        folder: is created in its parent, which must exist.
        repository: "OWNER/NAME", for the card.
        evaluation: folder of `vitrel evaluate` with these weights, for the card's table of scores; None: no table.

    Raises:
        OtherWeights: the evaluation is of other weights.
        FileExistsError: the folder exists.
        ValueError: the model is of timm or in training mode; see `export_model`.
    """
    segments, backbone = isinstance(model, Segmenter), backbone_of(model)
    if backbone is None:
        raise ValueError(
            f"only models of vitrel are uploaded, not {type(model).__name__}: convert a ViT or Swin of timm by "
            "vitrel.from_timm, upload others by timm.models.push_to_hf_hub, and unwrap compiled ones"
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    scores = "" if evaluation is None else _scores(model, Path(evaluation))
    names = backbone.pretrained_cfg.get("label_names") or ()
    if segments:
        folder.mkdir()
        save(model, folder / "model.safetensors")
    else:
        export_model(model, folder, "safetensors", about={"classes": names} if len(names) == model.num_classes else None)
    task = "image-segmentation" if segments else "image-classification" if model.num_classes else "image-feature-extraction"
    card = _CARD.format(
        data=ModelCardData(library_name="timm", pipeline_tag=task, tags=["vitrel"]).to_yaml(),
        name=repository.partition("/")[2],
        kind=type(backbone).__name__,
        position=backbone.current_arguments()["position"],
        outputs=f"It was trained at {format_size(backbone.img_size)} px and has {model.num_classes} classes.",
        timm="" if segments else _TIMM.format(repository=repository),
        repository=repository,
    )
    ModelCard(card + scores).save(folder / "README.md")
    return folder


def _scores(model: nn.Module, folder: Path) -> str:
    """Return a card's Markdown section of scores from an evaluation; OtherWeights if none of its models has these weights."""
    from vitrel.evaluate.folder import read_folder
    from vitrel.evaluate.report import first_screen
    from vitrel.evaluate.verdicts import judge

    found, own = read_folder(folder), state_hash(model)
    names = {name for name, about in found.settings["models"].items() if about["weights"] == own}
    rows = [row for row in found.rows if f"{row['label']}|{row['seed']}" in names]
    if not rows:
        raise OtherWeights(f"{folder} evaluates other weights than these: evaluate this model, and give that folder")
    judged = judge(rows, found.scores, found.settings["margin"])
    return f"\n## Scores by image size, on {Path(found.settings['data']).name}\n\n{first_screen(judged)}"
