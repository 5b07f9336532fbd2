import gc
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import random_model

import heads.layers.fast_linear
from heads.devices import this_processor
from heads.layers.fast_linear import FEWEST_NUMBERS, SMALL, PackedLinear, pack_weights

HERE = this_processor()
KINDS = [each for each in (torch.float32, torch.bfloat16) if HERE.multiplies_packed(each)]
pytestmark = pytest.mark.skipif(not KINDS, reason="oneDNN packs for x86")


class Products(dict):
    """Packed weights that count how often they were multiplied with."""

    number = 0

    def get(self, key: int, default: Any) -> Any:
        self.number += key in self
        return super().get(key, default)


@pytest.fixture(autouse=True)
def small_matrices_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads.layers.fast_linear, "FEWEST_NUMBERS", 1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    found = Products()
    monkeypatch.setattr(heads.layers.fast_linear, "_packed", found)
    return found


@pytest.fixture
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = replace(HERE, vectors=request.param)
    monkeypatch.setattr(heads.layers.fast_linear, "this_processor", lambda: processor)


def layers(dtype: torch.dtype, bias: bool, width: int = 48) -> tuple[nn.Linear, nn.Linear]:
    """One that is packed, and the same as it was."""
    torch.manual_seed(0)
    plain = nn.Linear(width, 32, bias).to(dtype).requires_grad_(False).eval()
    packed = deepcopy(plain)
    pack_weights(packed)
    return packed, plain


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (1, 2), (2, 3, 7), (0,), (2, 0), (3, 1, 1), (1, 4)])
@pytest.mark.parametrize("small", [SMALL, 0])
def test_products_are_those_of_the_plain_layer(
    dtype: torch.dtype,
    bias: bool,
    shape: tuple[int, ...],
    small: int,
    products: Products,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads.layers.fast_linear, "SMALL", small)
    packed, plain = layers(dtype, bias)
    rows = torch.randn(*shape, 48, dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(rows), plain(rows))
    assert products.number == 1


def test_rows_need_not_lie_behind_each_other() -> None:
    packed, plain = layers(torch.float32, bias=True)
    rows = torch.randn(4, 8, 96)[:, ::2, ::2]
    torch.testing.assert_close(packed(rows), plain(rows))


@pytest.mark.parametrize(
    ("vectors", "small", "expected"),
    [
        ("AVX512", 0, [4, 4, 4, 4, 9]), ("AVX512", SMALL, [2, 3, 4, 9]),
        ("AVX2", 0, [1, 2, 3, 4, 9]), ("AVX2", SMALL, [2, 3, 4, 9]),
    ],
    indirect=["vectors"],
)  # fmt: skip
@pytest.mark.usefixtures("vectors")
def test_with_avx512_a_large_matrix_is_multiplied_with_four_rows_or_more(
    small: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def product(rows: Tensor, *_: object) -> Tensor:
        numbers.append(len(rows))
        return rows.new_zeros(len(rows), 32)

    monkeypatch.setattr(heads.layers.fast_linear, "SMALL", small)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    packed, _ = layers(torch.float32, bias=False)
    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", product)
    for number in (1, 2, 3, 4, 9):
        packed(torch.randn(number, 48))
    assert numbers == expected


@pytest.mark.parametrize(
    ("vectors", "threads", "dtype", "width", "number"),
    [
        ("AVX512", 1, torch.float32, 48, 0), ("AVX512", 1, torch.float32, SMALL // 32 + 1, 1),
        ("AVX2", 2, torch.float32, 48, 0), ("AVX2", 2, torch.float32, SMALL // 32 + 1, 1),
        ("AVX2", 1, torch.float32, SMALL // 32 + 1, 0),
        ("AVX512", 1, torch.bfloat16, 48, 1), ("AVX2", 1, torch.bfloat16, 48, 1),
    ],
    indirect=["vectors"],
)  # fmt: skip
@pytest.mark.usefixtures("vectors")
def test_one_row_of_float32_goes_by_torch_where_the_matrix_is_small_or_vectors_and_threads_are(
    threads: int, dtype: torch.dtype, width: int, number: int, products: Products, monkeypatch
) -> None:
    if dtype not in KINDS:
        pytest.skip("oneDNN does not pack it here")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    packed, _ = layers(dtype, bias=False, width=width)
    packed(torch.randn(1, 1, width, dtype=dtype))
    assert products.number == number


@pytest.mark.parametrize("of", ["rows", "weight"])
def test_gradients_go_through_the_weights_beside(of: str, products: Products) -> None:
    packed, plain = layers(torch.float32, bias=False)
    rows = torch.randn(3, 48)
    found = []
    for layer in (packed, plain):
        layer.weight.requires_grad_(of == "weight")
        own = rows.clone().requires_grad_(of == "rows")
        layer(own).square().sum().backward()
        found.append(own.grad if of == "rows" else layer.weight.grad)
    assert found[0] is not None
    torch.testing.assert_close(found[0], found[1])
    assert products.number == 0


def test_rows_of_another_dtype_and_autocast_are_left_to_torch() -> None:
    packed, _ = layers(torch.float32, bias=False)
    rows = torch.randn(3, 48)
    with pytest.raises(RuntimeError, match="dtype"):
        packed(rows.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(rows).dtype == torch.bfloat16


def test_what_is_compiled_calls_the_product_as_it_is(products: Products) -> None:
    packed, plain = layers(torch.float32, bias=True)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    rows = torch.randn(3, 48)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows), plain(rows))
    assert products.number == 1


def test_a_layer_is_packed_once_and_let_go_with_its_weights() -> None:
    before = len(heads.layers.fast_linear._packed)
    packed, _ = layers(torch.float32, bias=True)
    pack_weights(nn.Sequential(packed, nn.LayerNorm(32)), packed)
    assert len(heads.layers.fast_linear._packed) == before + 1
    del packed
    gc.collect()
    assert len(heads.layers.fast_linear._packed) == before


def test_models_that_are_large_for_the_machine_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(num_hidden_layers=2)
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    size = sum(each.weight.nbytes for each in linear)
    monkeypatch.setattr(heads.layers.fast_linear, "_get_memory_bytes", lambda: 4 * size - 1)
    pack_weights(model)
    assert not any(isinstance(each, PackedLinear) for each in linear)
    monkeypatch.setattr(heads.layers.fast_linear, "_get_memory_bytes", lambda: 4 * size)
    pack_weights(model)
    assert all(isinstance(each, PackedLinear) for each in linear)


def test_a_model_gives_the_same_over_packed_weights() -> None:
    model, ids = random_model(num_hidden_layers=2), torch.tensor([[5, 17, 40, 8, 77]])
    packed = deepcopy(model)
    pack_weights(packed)
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, model(ids).logits)


def test_bfloat16_stays_where_its_products_are_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = replace(HERE, vectors="AVX512", instructions=frozenset())
    monkeypatch.setattr(heads.layers.fast_linear, "this_processor", lambda: processor)
    assert type(layers(torch.bfloat16, bias=False)[0]) is nn.Linear
    assert type(layers(torch.float32, bias=False)[0]) is PackedLinear


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_onednn_does_not_multiply_stay(dtype: torch.dtype) -> None:
    packed, _ = layers(dtype, bias=False)
    assert type(packed) is nn.Linear


@pytest.mark.parametrize(("width", "kind"), [(511, nn.Linear), (512, PackedLinear)])
def test_a_matrix_too_small_to_win_back_the_call_stays(
    width: int, kind: type[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads.layers.fast_linear, "FEWEST_NUMBERS", FEWEST_NUMBERS)
    layer = nn.Linear(width, 512)
    pack_weights(layer)
    assert type(layer) is kind


def test_weights_elsewhere_stay() -> None:
    layer = nn.Linear(8, 8, device="meta")
    pack_weights(layer)
    assert type(layer) is nn.Linear


def test_a_copy_whose_weights_change_goes_by_its_own() -> None:
    packed, _ = layers(torch.float32, bias=True)
    copied, rows = deepcopy(packed), torch.randn(5, 48)
    copied.weight.mul_(2)
    with torch.no_grad():
        expected = nn.functional.linear(rows, copied.weight, copied.bias)
        torch.testing.assert_close(copied(rows), expected)
        cast = deepcopy(packed).double()
        torch.testing.assert_close(cast(rows.double()).float(), packed(rows))
    copied = deepcopy(packed)
    del packed
    gc.collect()
    copied(rows)
