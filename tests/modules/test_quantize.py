"""Rows in few bits: against the float table, within proved bounds; lookups against the table they stand for."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from oracles import assert_near, fill_
from refusals import refused

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, HotCold, Path, Pool, Table, quantize_, save
from quorem.ops.codes import dequantize, quantize

SCHEMES = [Full(), QR(4), QR(4, operation="add"), QR(4, operation="concat"), Path(4, (6,)), HotCold(9, cold=Pool(60))]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("width", [17, 8, 5, 2, 1])
def test_each_number_is_off_by_at_most_one_scale(bits, size, width):
    torch.manual_seed(0)
    rows = torch.cat([torch.randn(500, width) * size, torch.rand(500, width) * size, torch.zeros(1, width)])
    codes = quantize(rows, bits)
    error = (dequantize(codes, torch.arange(len(rows)), width, bits) - rows).abs()
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    if width == 17:
        scale = ((high - low) / (2**bits - 1) * (1 + 2**-10)).clamp(min=2.0**-24) + 2.0**-24  # as rounded to float16
    else:  # of 16 rows, rounded up to three bits, in one byte
        assert codes.shape == (-(-len(rows) // 16), 16 * -(-width * bits // 8) + 1)
        scale = torch.maximum(high / (2 ** (bits - 1) - 1), -low / 2 ** (bits - 1)).clamp(min=2.0**-22) * 1.125
        scale = torch.cat([part.max().expand(len(part)) for part in scale.split(16)])
    assert (error <= scale[:, None]).all()
    assert (error <= 0.5001 * scale[:, None]).float().mean() > 0.99
    assert (error[-1] == 0).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [6, 24])
def test_lookups_and_bags_are_those_of_the_dequantized_table(scheme, bits, dtype, d):
    ids, offsets = torch.randint(0, 400, (60,)), torch.tensor([0, 5, 5, 31])
    table = quantize_(fill_(Embedding(400, d, scheme, padding_idx=2, dtype=dtype)), bits)
    expected = F.embedding(ids, table.to_dense())
    assert table(ids).dtype == dtype
    torch.testing.assert_close(table(ids), expected)
    bags = quantize_(fill_(EmbeddingBag(400, d, scheme, mode="mean", dtype=torch.float64)), bits)
    expected = F.embedding_bag(ids, bags.to_dense(), offsets, mode="mean")
    torch.testing.assert_close(bags(ids, offsets).float(), expected.float())  # rows are taken apart in float32
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert torch.equal(other(ids), table(ids))


def test_a_collection_with_tables_of_several_widths_and_its_state():
    made = [Table("a", 300, 16, QR(4)), Table("b", 90, 8, HotCold(5, cold=Pool(24), num_rest=30)), Table("c", 7, 8)]
    first, second = fill_(EmbeddingCollection(made)), EmbeddingCollection(made)
    dense = first.to_dense()
    quantize_(first)
    ids = torch.stack([torch.randint(0, n, (50,)) for n in (300, 90, 7)], 1)
    for name, table in first.to_dense().items():
        assert (table - dense[name]).abs().max() < 0.1
    with pytest.raises(
        RuntimeError, match="table 'a' holds mult of numbers of 8 bits for ids in the checkpoint and mult of floating"
    ):
        second.load_state_dict(first.state_dict())
    quantize_(second).load_state_dict(first.state_dict())
    assert torch.equal(first(ids), second(ids))
    assert [p.requires_grad for p in first.parameters()] == [False]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scheme", [QR(4), Path(4, (6,)), HotCold(9, cold=Path(4, (6,)), force=True)], ids=str)
@pytest.mark.parametrize("move", [lambda m, t: m.to(t), lambda m, t: m.type(t)], ids=["to", "type"])
def test_another_dtype_is_that_of_the_vectors(scheme, bits, move):
    """Rows stay bytes: as other numbers they would be read as other rows."""
    table = quantize_(fill_(Embedding(400, 8, scheme)), bits)
    ids, rows, vectors = torch.arange(400), table.stored.clone(), table(torch.arange(400))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        moved = move(copy.deepcopy(table), dtype)
        assert moved(ids).dtype == dtype and torch.equal(moved.stored, rows)
        out = moved(ids).float() if dtype == torch.float64 else moved(ids)  # rows are taken apart in float32
        torch.testing.assert_close(out, moved.to_dense().to(out.dtype))
        assert (out - vectors).abs().max() < 0.02 * vectors.abs().max()  # networks are rounded
    with pytest.raises(ValueError, match=r"dtype \(torch.int8\) must be one of torch.float32"):
        table.type(torch.int8)
    assert torch.equal(table.stored, rows)


test_errors = refused(
    (lambda: quantize_(Embedding(9, 4, Full()), bits=3), ValueError, r"bits \(3\) must be 8 or 4"),
    (lambda: quantize_(quantize_(Embedding(9, 4, Full()))), ValueError, "has tables of 8 bits already"),
    (lambda: quantize_(torch.nn.Linear(2, 2)), ValueError, r"module \(Linear\) must contain a quorem table"),
    (lambda: quantize_(3), TypeError, r"module \(int\) must be an nn.Module"),
)


@pytest.mark.parametrize(
    ("widths", "bits"),
    [((16, 20), (8, 0)), ((16, 32), (8, 4))],  # 16 codes and 4 bytes of scale; 32 codes of half a byte
    ids=["bytes and numbers", "8 and 4 bits"],
)
def test_rows_are_not_loaded_as_other_numbers_where_shapes_agree(widths, bits):
    first, second = (
        Embedding(50, d, QR(4)) if b == 0 else quantize_(Embedding(50, d, QR(4)), b)
        for d, b in zip(widths, bits, strict=True)
    )
    assert first.stored.shape == second.stored.shape
    for source, target in ((first, second), (second, first)):
        with pytest.raises(RuntimeError, match=r"numbers of 8 bits.* in the checkpoint|numbers of 8 bits.* here"):
            target.load_state_dict(source.state_dict())


def test_a_table_that_is_not_finite_is_refused_and_left_as_it_is():
    model = torch.nn.ModuleList([Embedding(9, 4, Full()), Embedding(9, 4, Full())])
    with torch.no_grad():
        model[1].stored[3, 2] = torch.inf
    with pytest.raises(ValueError, match=r"tables\.0 must be finite"):
        quantize_(model)
    assert model[0].stored.dtype == torch.float32


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scheme", [Full(width=2), HotCold(9, cold=Pool(60), num_rest=30, width=4)], ids=str)
def test_narrow_rows_are_quantized_and_their_matrix_is_rounded(scheme, bits, tmp_path):
    """At most half a byte more than a number of bits each, and one byte of scale; saved, loaded and exported."""
    made = [Table("a", 400, 16, scheme), Table("small", 9, 16)]
    module = fill_(EmbeddingCollection(made))
    state, (matrix,) = copy.deepcopy(module.state_dict()), module.projections
    quantize_(module, bits)
    assert module.stored.shape[1] == 16 * scheme.width * bits // 8 + 1
    assert torch.equal(module.projections[0], matrix.bfloat16()) and not module.projections[0].requires_grad
    ids = torch.stack([torch.randint(0, n, (50,)) for n in (400, 9)], 1)
    for dtype in (torch.float32, torch.float64, torch.float16):  # that of the vectors; the matrix stays as it is
        moved = copy.deepcopy(module).to(dtype)
        dense = moved.to_dense()
        expected = torch.cat([F.embedding(ids[:, t], dense[name]) for t, name in enumerate(dense)], 1)
        out = moved(ids).flatten(1)
        assert out.dtype == dtype and torch.equal(moved.projections[0], module.projections[0])
        assert_near(out, expected, torch.float16 if dtype == torch.float16 else torch.float32)
    with pytest.raises(RuntimeError, match=r"floating-point numbers for ids in the checkpoint and .* numbers of"):
        module.load_state_dict(state)
    other = quantize_(fill_(EmbeddingCollection(made), seed=1), bits)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(ids), module(ids))
    save(module, tmp_path / "tables")
    assert torch.equal(quorem.load(tmp_path / "tables")(ids), module(ids))
    program = torch.export.export(module, (ids,))
    torch.testing.assert_close(program.module()(ids), module(ids))


LIMITS = [(4, 8, 127 * 960), (4, 4, 7 * 960), (12, 8, 255 * 65504), (12, 4, 15 * 65504)]


@pytest.mark.parametrize(("width", "bits", "limit"), LIMITS)
def test_a_row_whose_scale_cannot_be_stored_is_refused(width, bits, limit):
    """The scale of a narrow row is one byte, and limits its largest number; else it is float16, and limits a span."""
    table = Embedding(9, width, Full(), dtype=torch.float64)
    with torch.no_grad():
        table.stored[3] = torch.tensor([-1, *[0] * (width - 2), limit if width == 4 else limit - 1])
    assert quantize_(copy.deepcopy(table), bits)(torch.tensor(3))[-1] == limit
    with torch.no_grad():
        table.stored[3, 0] = -1.01 * limit if width == 4 else -2
    with pytest.raises(ValueError, match=rf"tables\.0 has numbers up to .*: {bits} bits take"):
        quantize_(table, bits)
    assert table.stored.dtype == torch.float64


@pytest.mark.parametrize("scheme", [Full(), QR(4)], ids=str)
def test_values_are_not_set_after_quantizing(scheme):
    table = quantize_(fill_(Embedding(60, 8, scheme)))
    assert torch.equal(table.weight, table.to_dense()) and table.weight.shape == (60, 8)
    assert torch.equal(Embedding.from_pretrained(table).weight, table.to_dense())
    before = table.to_dense()
    for write in (
        table.fit_,
        lambda values: setattr(table, "weight", values),
        lambda values: setattr(table, "weight", torch.nn.Parameter(values)),
        lambda _: table.reset_parameters(),
    ):
        with pytest.raises(ValueError, match="a module of 8 bits takes no new values: set them before quantize_"):
            write(torch.ones(60, 8))
    assert torch.equal(table.to_dense(), before)


def test_sample_weights_that_are_learned_are_refused_where_their_gradient_would_be_lost():
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1, 2, requires_grad=True)
    bags = quantize_(EmbeddingBag(60, 8, QR(4), mode="sum"))
    with pytest.raises(ValueError, match="per_sample_weights must not require a gradient if rows are quantized"):
        bags(ids, None, weights)
    with torch.no_grad():
        assert torch.equal(bags(ids, None, weights), bags(ids))
    paths = quantize_(EmbeddingBag(60, 8, Path(4, (6,), force=True), mode="sum"))  # whose networks are not quantized
    paths(ids, None, weights).sum().backward()
    torch.testing.assert_close(weights.grad, paths.to_dense()[ids].sum(-1))
