"""FSDP2's usual recipe, one shard for each block: a block asks its own encoding, be it a table, a network or rotations."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import vitrel


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    dist.init_process_group("gloo", init_method=(tmp_path_factory.mktemp("meet") / "file").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


NAMES = {"vit": "vitrel_vit_n8_none", "swin": "vitrel_swin_n"}


@pytest.mark.slow
@pytest.mark.parametrize(("trunk", "key"), [("vit", "cpb"), ("vit", "rope_mixed"), ("vit", "shaw"), ("swin", "table")])
def test_every_block_a_shard_of_its_own(one_process, trunk, key):
    torch.manual_seed(0)
    sizes = dict(embed_dim=48, num_heads=4, depth=2) if trunk == "vit" else dict(embed_dim=32, num_heads=(2, 4), depths=(2, 2))
    plain = vitrel.create_model(NAMES[trunk], position=key, num_classes=3, **sizes)
    model = copy.deepcopy(plain)
    for block in model.blocks if trunk == "vit" else [block for stage in model.layers for block in stage.blocks]:
        fully_shard(block)
    fully_shard(model)
    for size in ((64, 64), (40, 72)):
        image = torch.randn(2, 3, *size)
        found = []
        for m in (plain, model):
            m.zero_grad()
            m(image).square().sum().backward()
            found.append([p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in m.parameters()])
        for ours, wanted in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)
