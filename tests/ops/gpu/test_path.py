"""The Triton kernels of path networks against the plain versions: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, assert_close
from torch import Tensor

import quorem
from quorem.ops import autograd, path
from quorem.ops.layout import FEATURE
from quorem.ops.rows import buckets_of, numbers_of

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import path as gpu_path

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]


def path_case(scheme: quorem.Path, b: int, others: str = "b") -> tuple[tuple, dict, Tensor]:  # type: ignore[type-arg]
    """Inputs and options of the op for three tables, those named in ``others`` full; and a gradient."""
    torch.manual_seed(0)
    sizes = {"a": 63 * 64, "b": 9, "c": 2 * 63 * 64}
    schemes = {name: quorem.Full() if name in others else scheme for name in sizes}
    tables = [quorem.Table(name, n, 12, schemes[name], padding_idx=2) for name, n in sizes.items()]
    module = quorem.EmbeddingCollection(tables, device=DEVICE)
    networks = module.paths[0]
    for p in networks.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    layers = [t.detach() for pair in zip(networks.weights, networks.biases, strict=True) for t in pair]
    ids = torch.stack([torch.randint(n, (b,)) for n in sizes.values()], 1)
    ids[b // 2, 2], ids[-1] = 2, torch.tensor([-1, 2**40, sizes["c"]])  # take no network
    vectors, grad = torch.randn(2, b, 3, 12, device=DEVICE)
    integers = (networks.network_slots, networks.network_parts, networks.all_columns)
    options = {"networks": networks.most[0], "activation": scheme.activation}
    return (vectors, ids.to(DEVICE), layers, *integers), options, grad


def check_path(inputs: tuple, options: dict, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[type-arg]
    """Vectors and gradients against the plain version; gives the lists."""
    truth, *_ = path.path(*inputs, **options)
    out, *lists = gpu_path.path(*inputs, **options)
    assert_close(out, truth, torch.float32, "out", slack=4)
    mine = gpu_path.path_backward(grad, *inputs, *lists, **options)
    empty = inputs[0].new_empty(0)
    true = path.path_backward(grad, *inputs, empty, empty, **options)
    for i, (m, t) in enumerate(zip(mine, true, strict=True)):
        assert_close(m, t, torch.float32, f"gradient {i}", slack=8)
    vectors, members, columns = inputs[0], len(inputs[3]), inputs[5]
    assert torch.equal(out[:, columns[members:]], vectors[:, columns[members:]])
    assert torch.equal(mine[0][:, columns[members:]], grad[:, columns[members:]])
    return lists[0], lists[1]


@pytest.mark.parametrize(("hidden", "activation"), [((), "relu"), ((16,), "relu"), ((20,), "sigmoid"), ((64,), "relu")])
def test_path_and_its_gradients(hidden: tuple[int, ...], activation: str) -> None:
    check_path(*path_case(quorem.Path(4, hidden, activation=activation, force=True), 200 if CUDA else 70))


@pytest.mark.parametrize(
    ("networks", "b", "others"),
    [(1, 1, "a"), (1, 70, "bc"), (4, 9, ""), (4, 65, "ab"), (4, 512, "c"), (4, 600, "a"), (63, 70, "ab"), (64, 20, "c")]
    + [(64, 70, others) for others in ("", "a", "c")],
)
def test_path_lists_every_id_once(networks: int, b: int, others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program per feature and by several, with columns that pass before and after the others."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(-1))
    inputs, options, grad = path_case(quorem.Path(networks, (5,), force=True), b, others)
    counts, lists = check_path(inputs, options, grad)
    assert options["networks"] == networks
    _, ids, _, slots, parts, _ = inputs
    none = slots.new_zeros(0)
    numbers = numbers_of(ids[:, slots[:, FEATURE]], slots, none)
    listed_in = torch.where(numbers.valid, buckets_of(numbers, parts, none)[..., 0], networks)
    for k, (count, listed) in enumerate(zip(counts.tolist(), lists, strict=True)):
        m, j = divmod(k, networks + 1)
        assert listed[:count].sort()[0].tolist() == (listed_in[:, m] == j).nonzero()[:, 0].tolist()


def test_paths_of_several_levels_and_shapes_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch passes on what the others transform."""
    schemes = [quorem.Path(6, (5,), num_partitions=3, force=True), quorem.Full(), quorem.Path(4, (), force=True)]
    tables = [quorem.Table(f"t{i}", 60 + i, 12, scheme) for i, scheme in enumerate([*schemes, schemes[0]])]
    module = quorem.EmbeddingCollection(tables, device=DEVICE)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    ids = torch.randint(60, (40, 4), device=DEVICE)
    launches = []

    def fused(*inputs, **options):  # type: ignore[no-untyped-def]
        launches.append(options["networks"])
        return gpu_path.path(*inputs, **options)[0]

    with torch.no_grad():
        monkeypatch.setattr(autograd, "path_is_fused", lambda *_: False)
        truth = module(ids)
        monkeypatch.setattr(autograd, "path_is_fused", lambda *_: True)
        by_op = module(ids)
        monkeypatch.setattr(autograd, "path", fused)
        assert_close(module(ids), truth, torch.float32, "out", slack=4)
    assert_close(by_op, truth, torch.float32, "out", slack=4)
    assert len(launches) == 3
