"""The paper's sections 2 to 4 and its appendix, statement by statement (Shi et al., KDD 2020)."""

import itertools
import math
from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import OPERATIONS, definition_1, fill_
from torch import Tensor

from quorem import QR, ChineseRemainder, Custom, Embedding, Full, GeneralizedQR, Hash, Path, partitions
from quorem.paper.partitions import ExplicitPartition, Partition, is_complementary

# Distinct tokens of the 26 categorical features of Criteo Kaggle; each table has one row more, for missing values.
TOKENS = [1460, 583, 10131226, 2202607, 305, 23, 12517, 633, 3, 93145, 5683, 8351592, 3194, 27, 14992, 5461305, 10]
TOKENS += [5652, 2172, 3, 7046546, 17, 15, 286180, 104, 142571]
CRITEO = [count + 1 for count in TOKENS]

sizes_lists = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def one_hot(i: int, n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)[i]


def table(n: int, d: int, scheme: object) -> Embedding:
    return fill_(Embedding(n, d, scheme, dtype=torch.float64))


def set_tables_(module: Embedding, *values: Sequence[Sequence[float]]) -> Embedding:
    with torch.no_grad():
        for stored, rows in zip(module.tables(), values, strict=True):
            stored.copy_(torch.tensor(rows))
    return module


# Section 2: the hashing trick and the quotient-remainder trick.


def test_equation_1_a_full_table_is_a_product_with_a_one_hot_vector() -> None:
    n, d = 7, 3
    module = table(n, d, Full())
    (W,) = module.tables()
    for i in range(n):
        torch.testing.assert_close(module(torch.tensor(i)), W.T @ one_hot(i, n))


@pytest.mark.parametrize(("n", "collisions"), [(12, 3), (13, 4), (10, 10)])
def test_equations_2_and_3_the_hash_matrix(n: int, collisions: int) -> None:
    module = table(n, 3, Hash(collisions))
    (W,) = module.tables()
    m = math.ceil(n / collisions)
    assert W.shape == (m, 3)
    R = torch.tensor([[float(j % m == i) for j in range(n)] for i in range(m)], dtype=torch.float64)
    for i in range(n):
        torch.testing.assert_close(module(torch.tensor(i)), W.T @ R @ one_hot(i, n))
        torch.testing.assert_close(module(torch.tensor(i)), W[i % m])  # algorithm 1


@pytest.mark.parametrize(("n", "collisions"), [(12, 3), (13, 4), (60, 5)])
def test_equations_4_and_5_the_two_hash_matrices(n: int, collisions: int) -> None:
    module = table(n, 3, QR(collisions, force=True))
    W1, W2 = module.tables()
    m = math.ceil(n / collisions)
    assert (len(W1), len(W2)) == (m, math.ceil(n / m))
    R = torch.tensor([[float(j % m == i) for j in range(n)] for i in range(m)], dtype=torch.float64)
    Q = torch.tensor([[float(j // m == i) for j in range(n)] for i in range(len(W2))], dtype=torch.float64)
    for i in range(n):
        e = one_hot(i, n)
        torch.testing.assert_close(module(torch.tensor(i)), (W1.T @ R @ e) * (W2.T @ Q @ e))
        torch.testing.assert_close(module(torch.tensor(i)), W1[i % m] * W2[i // m])  # algorithm 2


# Section 3: complementary partitions.


def test_the_example_of_five_categories() -> None:
    classes = [[{0}, {1, 3, 4}, {2}], [{0, 1, 3}, {2, 4}], [{0, 3}, {1, 2, 4}]]
    parts = [ExplicitPartition([next(b for b, c in enumerate(p) if x in c) for x in range(5)]) for p in classes]
    assert definition_1(parts, 5) and is_complementary(parts, 5)
    for pair in itertools.combinations(parts, 2):  # all three are needed
        assert not definition_1(pair, 5) and not is_complementary(pair, 5)
    module = table(5, 6, Custom(parts, operation="concat", force=True))
    assert module.num_duplicates() == 0 and module.num_parameters == (3 + 2 + 2) * 2


@given(st.integers(1, 60), st.data())
def test_the_four_families_are_complementary(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, n))
    families = [partitions.naive(n), partitions.quotient_remainder(n, m)]
    families.append(partitions.generalized_quotient_remainder(n, partitions.balanced_sizes(n, 3)))
    families.append(partitions.chinese_remainder(n, partitions.coprime_sizes(n, 3)))
    for parts in families:
        assert definition_1(parts, n)
    assert definition_1(partitions.hashing(n, m), n) == (m == n)


@given(sizes_lists, st.data())
def test_sizes_of_any_choice_are_complementary_under_the_conditions(sizes: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, min(math.prod(sizes), 80)))
    assert definition_1(partitions.generalized_quotient_remainder(n, sizes), n)
    if all(math.gcd(a, b) == 1 for a, b in itertools.combinations(sizes, 2)):
        assert definition_1(partitions.chinese_remainder(n, sizes), n)


@given(sizes_lists)
def test_without_enough_combinations_no_partitions_are_complementary(sizes: list[int]) -> None:
    n = math.prod(sizes) + 1
    assume(n <= 200)
    digits = [Partition(math.prod(sizes[:j]), size) for j, size in enumerate(sizes)]
    remainders = [Partition(1, size) for size in sizes]
    assert not definition_1(digits, n) and not definition_1(remainders, n)
    for family in (partitions.generalized_quotient_remainder, partitions.chinese_remainder):
        with pytest.raises(ValueError, match=r"must be >= n"):
            family(n, sizes)


@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 5))
def test_remainders_by_sizes_that_share_a_factor_are_not_complementary(common: int, a: int, b: int) -> None:
    sizes = (common * a, common * b)
    n = math.prod(sizes)  # enough combinations, were the sizes coprime
    assert not definition_1([Partition(1, size) for size in sizes], n)
    with pytest.raises(ValueError, match="must be pairwise coprime"):
        partitions.chinese_remainder(n, sizes)


def test_the_quotient_alone_and_the_remainder_alone_are_not_complementary() -> None:
    remainder, quotient = partitions.quotient_remainder(12, 4)
    assert not definition_1([remainder], 12) and not definition_1([quotient], 12)
    assert definition_1([remainder, quotient], 12)


# Section 4: operations, theorem 1, memory.


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_operation_takes_one_row_of_each_table(operation: str) -> None:
    n, sizes, d = 60, (5, 4, 3), 6
    module = table(n, d, ChineseRemainder(3, operation=operation))
    tables = module.tables()
    assert [len(t) for t in tables] == list(sizes)
    for i in range(n):
        z = [W.T @ one_hot(i % m, m) for W, m in zip(tables, sizes, strict=True)]
        omega = {"concat": torch.cat, "add": sum, "mult": lambda z: z[0] * z[1] * z[2], "feature": torch.stack}
        torch.testing.assert_close(module(torch.tensor(i)), omega[operation](z))


def test_multiplication_is_an_outer_product_of_tables() -> None:
    """The footnote: W[:, ..., :, d] = W_1[:, d] x ... x W_k[:, d], where every combination of buckets is an id."""
    sizes, d = (5, 4, 3), 2
    parts = partitions.generalized_quotient_remainder(60, sizes)
    module = table(60, d, Custom(parts, operation="mult"))
    tensor = module.to_dense().view(*reversed(sizes), d).permute(2, 1, 0, 3)  # the first digit varies fastest
    torch.testing.assert_close(tensor, torch.einsum("ad,bd,cd->abcd", *module.tables()))
    for column in range(d):
        outer = reduce(lambda a, b: a[..., None] * b, [W[:, column] for W in module.tables()])
        torch.testing.assert_close(tensor[..., column], outer)


def test_the_path_equation() -> None:
    """x = (M_{k,p_k(x)} o ... o M_{2,p_2(x)})(W e_{p_1(x)}), with M(z) = A_2 relu(A_1 z + b_1) + b_2."""
    n, d = 40, 3
    module = table(n, d, Path(8, (4,), num_partitions=3, force=True))
    (W,), (group,) = module.tables(), module.paths
    A, b = list(group.weights), list(group.biases)  # two layers at each of two levels; A is stored transposed
    for i in range(n):
        p1, p2, p3 = i % 5, i // 5 % 3, i // 15
        z = W.T @ one_hot(p1, 5)
        z = A[1][p2].T @ torch.relu(A[0][p2].T @ z + b[0][p2]) + b[1][p2]
        z = A[3][p3].T @ torch.relu(A[2][p3].T @ z + b[2][p3]) + b[3][p3]
        torch.testing.assert_close(module(torch.tensor(i)), z)


@given(st.integers(1, 60), st.integers(1, 4), st.booleans(), st.data())
def test_theorem_1_concatenated_rows_are_unique(n: int, k: int, chinese: bool, data: st.DataObject) -> None:
    """Distinct rows in each table, complementary partitions: every category has a vector of its own."""
    scheme = ChineseRemainder if chinese else GeneralizedQR
    module = Embedding(n, 2 * k, scheme(k, operation="concat", force=True))
    rows = st.tuples(st.integers(-9, 9), st.integers(-9, 9))
    sizes = [len(stored) for stored in module.tables()]
    set_tables_(module, *(data.draw(st.lists(rows, min_size=s, max_size=s, unique=True)) for s in sizes))
    assert module.num_duplicates() == 0


def test_theorem_1_needs_distinct_rows_and_complementary_partitions() -> None:
    same = set_tables_(Embedding(4, 2, QR(2, operation="concat", force=True)), [[1.0], [1.0]], [[1.0], [2.0]])
    assert same.num_duplicates() == 2
    parts = [Partition(1, 2), Partition(1, 4)]
    module = Embedding(8, 2, Custom(parts, operation="concat", check=False, force=True))
    assert module.num_duplicates() == 4


@pytest.mark.parametrize("operation", ["add", "mult"])
def test_sums_and_products_of_distinct_rows_can_collide(operation: str) -> None:
    """Where theorem 1 does not reach: 0 + 1 = 1 + 0 and 1 * 2 = 2 * 1."""
    rows = [[0.0], [1.0]] if operation == "add" else [[1.0], [2.0]]
    module = set_tables_(Embedding(4, 1, QR(2, operation=operation, force=True)), rows, rows)
    assert module.num_duplicates() == 1
    assert torch.equal(module(torch.tensor(1)), module(torch.tensor(2)))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("scheme", [QR, GeneralizedQR, ChineseRemainder], ids=lambda s: s.__name__)
def test_random_starts_do_not_collide(scheme: type, operation: str) -> None:
    torch.manual_seed(0)
    module = Embedding(3000, 12, scheme(operation=operation))
    assert module.num_duplicates() == 0


def test_hashing_collides() -> None:
    assert Embedding(3000, 12, Hash(4)).num_duplicates() == 3000 - 750


@given(st.integers(1, 10**9), st.integers(1, 10**5), st.integers(1, 64))
def test_quotient_remainder_stores_rows_of_both_tables(n: int, collisions: int, d: int) -> None:
    """O(|S| / m D + m D): exactly ceil(|S| / m) + m rows."""
    for large in ("remainder", "quotient"):
        spec = QR(collisions, large=large, force=True).spec(n, d)
        m = spec.partitions[0].size
        assert spec.num_parameters == (math.ceil(n / m) + m) * d


def test_quotient_remainder_reaches_the_square_root() -> None:
    for root in (10, 1000, 10**6):
        assert QR(root).spec(root**2, 16).num_parameters == 2 * root * 16


@given(st.integers(2, 10**15), st.integers(1, 6), st.integers(1, 64))
def test_k_partitions_store_k_roots(n: int, k: int, d: int) -> None:
    """O(k |S|^(1/k) D): k tables of r rows at most, where r is the k-th root rounded up, and of r - 1 at least."""
    r = partitions.balanced_sizes(n, k)[0]
    assert (r - 1) ** k < n <= r**k
    spec = GeneralizedQR(k, force=True).spec(n, d)
    assert k * (r - 1) * d < spec.num_parameters <= k * r * d
    assert GeneralizedQR(k, force=True).spec(r**k, d).num_parameters == k * r * d


@settings(max_examples=30)
@given(st.integers(10, 10**9), st.integers(2, 3))
def test_coprime_sizes_cost_little_more(n: int, k: int) -> None:
    """r, r + 1 and, for odd r, r + 2 are coprime: at most 2 rows more for two tables, and 8 for three."""
    rows = [sum(p.size for p in s.spec(n, 1).partitions) for s in (GeneralizedQR(k), ChineseRemainder(k))]
    assert rows[0] <= rows[1] <= rows[0] + {2: 2, 3: 8}[k]


@given(st.integers(100, 10**7), st.integers(1, 64), st.lists(st.integers(1, 64), max_size=2))
def test_path_networks_of_fixed_size_add_a_constant(n: int, d: int, hidden: list[int]) -> None:
    spec = Path(4, hidden, force=True).spec(n, d)
    network = sum(a * b + b for a, b in itertools.pairwise([d, *hidden, d]))
    assert spec.num_parameters == math.ceil(n / 4) * d + len(range(0, n, math.ceil(n / 4))) * network


# Section 5: embedding parameters on Criteo Kaggle, D = 16.


def parameters(scheme: object) -> int:
    return sum(scheme.spec(n, 16).num_parameters for n in CRITEO)


def test_parameters_of_the_full_tables() -> None:
    assert len(CRITEO) == 26 and sum(CRITEO) == 33_762_591
    assert parameters(Full()) == 540_201_456  # "approximately 5.4 x 10^8"


HASHED = {2: 270100816, 3: 180067296, 4: 135050512, 5: 108040480, 6: 90033744, 7: 77171808, 60: 9003600}


@pytest.mark.parametrize("collisions", HASHED)
def test_parameters_by_collisions(collisions: int) -> None:
    hashed = HASHED[collisions]
    assert parameters(Hash(collisions)) == parameters(Hash(collisions, force=True)) == hashed
    # The small table has c rows, or as many as there are ids.
    added = 16 * sum(min(collisions, n) for n in CRITEO)
    assert parameters(QR(collisions, large="quotient", force=True)) == hashed + added
    if collisions <= min(CRITEO):
        assert added == 26 * collisions * 16
    # The quotient of the last id by the remainder's size, plus one: c rows, or fewer.
    forced = hashed + 16 * sum((n - 1) // -(-n // collisions) + 1 for n in CRITEO)
    assert parameters(QR(collisions, force=True)) == forced
    for operation in ("add", "mult", "feature"):
        assert parameters(QR(collisions, operation=operation, force=True)) == forced
    # Without force no table grows: each is the smaller of the two.
    each = [min(n, -(-n // collisions) + (n - 1) // -(-n // collisions) + 1) for n in CRITEO]
    assert parameters(QR(collisions)) == 16 * sum(each) <= forced
    assert parameters(QR(collisions, operation="concat", force=True)) == forced // 2


def test_four_collisions_shrink_the_tables_fourfold_and_sixty_sixtyfold() -> None:
    full = parameters(Full())
    assert full / parameters(QR(4)) == pytest.approx(4, rel=1e-4)
    assert parameters(Hash(4)) / parameters(QR(60)) == pytest.approx(15, rel=0.01)  # "approximately 15x smaller"
