"""The Triton kernels of path networks against the plain version: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, assert_close

import quorem

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import path

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]


def check_paths(scheme: quorem.Path, b: int, others: str = "b") -> None:
    """Vectors and gradients of three tables, those named in ``others`` full; some ids take no network."""
    torch.manual_seed(0)
    sizes = {"a": 63 * 64, "b": 9, "c": 2 * 63 * 64}
    schemes = {name: quorem.Full() if name in others else scheme for name in sizes}
    tables = [quorem.Table(name, n, 12, schemes[name], padding_idx=2) for name, n in sizes.items()]
    module = quorem.EmbeddingCollection(tables, device=DEVICE)
    (networks,) = module.paths
    for p in networks.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    ids = torch.stack([torch.randint(n, (b,)) for n in sizes.values()], 1)
    ids[b // 2, 2], ids[-1] = 2, torch.tensor([-1, 2**40, sizes["c"]])  # take no network
    ids, features = ids.to(DEVICE), len(networks.features)
    vectors, grad = torch.randn(2, b, features, 12, device=DEVICE)

    def plain(read: torch.Tensor) -> torch.Tensor:
        member = torch.arange(features, device=DEVICE).repeat(b)
        ranks = module.layout.ranks
        return networks(read.flatten(0, 1), ids[:, networks.features].flatten(), member, ranks).view_as(read)

    results = []
    for transform in (plain, lambda read: networks._fused(read, ids)):
        leaf = vectors.clone().requires_grad_()
        out = transform(leaf)
        results.append([out, *torch.autograd.grad(out, [leaf, *networks.parameters()], grad)])
    for n, (truth, fused) in enumerate(zip(*results, strict=True)):
        assert_close(fused, truth, torch.float32, f"tensor {n}", slack=8)


@pytest.mark.parametrize(("hidden", "activation"), [((), "relu"), ((16,), "relu"), ((20,), "sigmoid"), ((64,), "relu")])
def test_shapes_and_activations(hidden: tuple[int, ...], activation: str) -> None:
    check_paths(quorem.Path(4, hidden, activation=activation, force=True), 200 if CUDA else 70)


@pytest.mark.parametrize(
    ("networks", "b", "others"),
    [
        (1, 1, "a"),
        (1, 70, "bc"),
        (4, 9, ""),
        (4, 65, "ab"),
        (4, 512, "c"),
        (4, 600, "a"),
        (63, 70, "ab"),
        (64, 20, "c"),
    ],
)
def test_numbers_of_networks_and_ids(networks: int, b: int, others: str) -> None:
    """By one program per feature that lists ids and by several."""
    check_paths(quorem.Path(networks, (5,), force=True), b, others)


def test_several_levels() -> None:
    check_paths(quorem.Path(6, (5,), num_partitions=3, force=True), 40)


def test_what_the_kernels_do_not_support_is_left_to_plain_pytorch() -> None:
    vectors = torch.randn(3, 1, 12)
    assert path.can_fuse(vectors, [vectors, vectors], 64)
    assert not path.can_fuse(vectors, [vectors, vectors], 65)
    assert not path.can_fuse(vectors.double(), [vectors, vectors], 4)
    assert not path.can_fuse(vectors, [vectors] * 6, 4)
