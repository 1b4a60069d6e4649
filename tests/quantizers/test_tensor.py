from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from te_ops.errors import RecipeError, ShapeError
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    quantize,
)
from tests.quantizers import oracle
from tests.quantizers.kinds import every, make, usages


def parts(q):
    return [t for r in (q.rowwise, q.columnwise) if r is not None for t in r.tensors()]


def same_bits(a, b):
    assert isinstance(a, QuantizedTensor)
    assert (a.shape, a.dtype, a.quantizer) == (b.shape, b.dtype, b.quantizer)
    assert len(parts(a)) == len(parts(b))
    return all(oracle.same_bytes(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def independent(a, b):
    ours = {t.untyped_storage().data_ptr() for t in parts(a)}
    return ours.isdisjoint(t.untyped_storage().data_ptr() for t in parts(b))


@every
@usages
@pytest.mark.parametrize("shape", [(128, 256), (3, 5, 7), (9,), ()], ids=str)
def test_shape_is_the_logical_one(quantizer, rowwise, columnwise, shape):
    x = torch.randn(shape, dtype=torch.bfloat16)
    for q in (
        make(x, quantizer, rowwise=rowwise, columnwise=columnwise),
        quantizer.make_empty(shape, dtype=torch.bfloat16, rowwise=rowwise, columnwise=columnwise),
    ):
        assert q.shape == q.size() == x.shape
        assert q.dim() == x.dim()
        assert q.numel() == x.numel()
        assert q.stride() == x.stride()
        assert q.dtype is x.dtype
        assert q.device == x.device
        if shape:
            assert q.size(-1) == shape[-1]
        assert (q.rowwise is not None) == rowwise
        assert (q.columnwise is not None) == columnwise
        assert q.nbytes == sum(t.numel() * t.element_size() for t in parts(q))
        assert quantizer.describe() in repr(q)


@every
@usages
def test_gradients_pass_straight_through(quantizer, rowwise, columnwise):
    x = torch.randn(16, 32, requires_grad=True)
    q = make(x, quantizer, rowwise=rowwise, columnwise=columnwise)
    assert q.requires_grad
    q.dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not q.detach().requires_grad
    assert not q.detach().dequantize().requires_grad
    x.grad = None
    weight = torch.randn(16, 32)
    (q * weight).sum().backward()  # an unknown op on the quantized tensor itself
    assert torch.equal(x.grad, weight)
    with torch.no_grad():
        assert not make(x, quantizer, rowwise=rowwise, columnwise=columnwise).requires_grad


def test_gradient_dtype_follows_the_tensor():
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    q = quantize(x, MXFP8Quantizer())
    q.dequantize(torch.float32).sum().backward()
    assert x.grad.dtype is torch.bfloat16


@every
@usages
def test_moves_keep_the_bytes(quantizer, rowwise, columnwise):
    q = make(torch.randn(20, 40), quantizer, rowwise=rowwise, columnwise=columnwise)
    assert q.cpu() is q
    assert q.to("cpu", non_blocking=True) is q
    assert same_bits(q.to("cpu", copy=True), q)
    assert same_bits(q.clone(), q)
    assert independent(q.clone(), q)
    assert same_bits(q.detach(), q)
    assert not independent(q.detach(), q)
    away = q.to("meta")
    assert isinstance(away, QuantizedTensor)
    assert away.device.type == "meta"
    assert all(t.device.type == "meta" for t in parts(away))
    assert same_bits(torch.empty_like(q, device="cpu").copy_(q), q)
    assert same_bits(q.new_empty(q.shape).copy_(q), q)
    if torch.cuda.is_available():
        there = q.cuda()
        assert there.is_cuda
        assert same_bits(there.cpu(), q)


@every
def test_a_module_moves_its_quantized_parameters(quantizer):
    if quantizer.stateful or quantizer.stochastic:
        pytest.skip("writes need a scale or a seed")
    module = torch.nn.Linear(32, 16)
    q = make(module.weight.detach(), quantizer)
    module.weight = torch.nn.Parameter(q)
    module.to("cpu")
    module.cpu()
    assert same_bits(module.weight, q)
    assert isinstance(module.weight, torch.nn.Parameter)
    module(torch.randn(3, 32)).sum().backward()
    assert module.weight.grad.shape == (16, 32)
    module.zero_grad()
    twin = torch.nn.Linear(32, 16)
    twin.weight = torch.nn.Parameter(quantizer.make_empty((16, 32)))
    twin.load_state_dict(module.state_dict())
    assert same_bits(twin.weight, q)
    dense = torch.nn.Linear(32, 16)
    dense.load_state_dict(module.state_dict())
    assert torch.equal(dense.weight, q.dequantize())
    module.to("meta")
    assert module.weight.device.type == "meta"
    assert isinstance(module.weight, QuantizedTensor)
    assert module.weight.rowwise.data.device.type == "meta"


@every
@usages
def test_bytes_can_be_shared_with_processes(quantizer, rowwise, columnwise):
    q = make(torch.randn(32, 16), quantizer, rowwise=rowwise, columnwise=columnwise)
    module = torch.nn.Linear(16, 32, bias=False)
    module.weight = torch.nn.Parameter(q, requires_grad=False)
    before = copy.deepcopy(q)
    assert not q.is_shared()
    assert module.share_memory() is module
    assert module.weight.is_shared()
    assert all(part.is_shared() for part in parts(module.weight))
    assert same_bits(module.weight, before)


@every
@usages
@pytest.mark.parametrize("requires_grad", [False, True])
def test_copies_are_equal_and_independent(quantizer, rowwise, columnwise, requires_grad):
    q = make(torch.randn(20, 40), quantizer, rowwise=rowwise, columnwise=columnwise)
    q.requires_grad_(requires_grad)
    buffer = io.BytesIO()
    torch.save({"q": q}, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(q),
        pickle.loads(pickle.dumps(q)),
        torch.load(buffer, weights_only=True)["q"],
    ):
        assert same_bits(other, q)
        assert independent(other, q)
        assert other.requires_grad == requires_grad
        for mine, theirs in ((q.rowwise, other.rowwise), (q.columnwise, other.columnwise)):
            assert (mine is None) == (theirs is None)
            assert mine is None or mine.quantizer == theirs.quantizer


def test_deepcopy_of_a_model_keeps_ties_parameters_and_gradients():
    a, b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    a.weight = torch.nn.Parameter(quantize(a.weight.detach(), MXFP8Quantizer()))
    b.weight = a.weight
    a.weight.grad = torch.ones(8, 8)
    twins = copy.deepcopy(torch.nn.ModuleList([a, b]))
    assert twins[0].weight is twins[1].weight
    assert isinstance(twins[0].weight, torch.nn.Parameter)
    assert same_bits(twins[0].weight, a.weight)
    assert torch.equal(twins[0].weight.grad, a.weight.grad)
    assert len(list(twins.parameters())) == 3
    loaded = pickle.loads(pickle.dumps(a.weight))
    assert isinstance(loaded, torch.nn.Parameter)


def test_deepcopy_of_a_result_is_refused():
    q = quantize(torch.ones(3, requires_grad=True), MXFP8Quantizer())
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(q)


@every
@usages
def test_views_that_keep_the_last_dimension_keep_the_bytes(quantizer, rowwise, columnwise):
    q = make(torch.randn(6, 40), quantizer, rowwise=rowwise, columnwise=columnwise)
    for view in (q.view(2, 3, 40), q.reshape(3, -1, 40), q.unflatten(0, (3, 2))):
        assert isinstance(view, QuantizedTensor)
        assert not independent(view, q)
        assert torch.equal(view.dequantize().view(6, 40), q.dequantize())
    assert torch.equal(torch.as_tensor(q.view(-1)) + 0, q.dequantize().view(-1))
    with pytest.raises(RuntimeError, match="invalid"):
        q.view(7, 40)


@every
def test_other_functions_see_the_values(quantizer):
    q = make(torch.randn(16, 32), quantizer, columnwise=True)
    values = q.dequantize()
    x = torch.randn(4, 32)
    assert torch.equal(torch.nn.functional.linear(x, q), torch.nn.functional.linear(x, values))
    assert torch.equal(q + 1, values + 1)
    assert torch.equal(q[3:5], values[3:5])
    assert torch.equal(q.t(), values.t())
    assert torch.equal(torch.cat([q, q]), torch.cat([values, values]))
    assert q.tolist() == values.tolist()
    assert (q.numpy() == values.numpy()).all()
    assert torch.equal(torch.zeros_like(q), torch.zeros(16, 32))
    assert torch.equal(values.clone().copy_(q), values)
    assert q.sum().item() == values.sum().item()
    half = q.to(torch.bfloat16)
    assert type(half) is torch.Tensor
    assert torch.equal(half, q.dequantize(torch.bfloat16))


@every
@usages
def test_quantizing_again_rounds_nothing_twice(quantizer, rowwise, columnwise):
    q = make(torch.randn(20, 40), quantizer, rowwise=rowwise, columnwise=columnwise)
    again = make(q, quantizer, rowwise=rowwise, columnwise=columnwise)
    assert same_bits(again, q)
    if quantizer.exact_other_usage():
        both = quantize(q, quantizer, columnwise=True)  # needs neither scale nor seed
        assert torch.equal(both.rowwise.dequantize(), q.dequantize())
        assert torch.equal(both.columnwise.dequantize(), q.dequantize())


def test_another_format_starts_from_the_values():
    q = quantize(torch.randn(20, 40), MXFP8Quantizer())
    other = quantize(q, NVFP4Quantizer())
    assert same_bits(other, quantize(q.dequantize(), NVFP4Quantizer()))


def test_writing_in_place_quantizes_again():
    quantizer = Float8CurrentScalingQuantizer()
    q = quantize(torch.randn(8, 8), quantizer, columnwise=True)
    values, alias = q.dequantize(), q.detach()
    q.mul_(3.0)
    assert same_bits(q, quantize(values * 3.0, quantizer, columnwise=True))
    assert same_bits(alias, q)
    q.copy_(torch.ones(8, 8, dtype=torch.float64))
    assert torch.equal(q.dequantize(), torch.ones(8, 8))
    assert torch.equal(q.columnwise.dequantize(), torch.ones(8, 8))
    torch._foreach_add_([q], 1.0)
    assert torch.equal(q.dequantize(), torch.full((8, 8), 2.0))
    parameter = torch.nn.Parameter(q)
    parameter.grad = torch.ones(8, 8)
    torch.optim.SGD([parameter], lr=0.5).step()
    assert torch.equal(parameter.dequantize(), torch.full((8, 8), 1.5))


@pytest.mark.parametrize("quantizer", [Float8Quantizer(), NVFP4Quantizer(stochastic_rounding=True)])
def test_writing_without_a_scale_or_seed_is_refused(quantizer):
    q = make(torch.randn(8, 8), quantizer)
    kept = q.clone()
    for write in (lambda: q.mul_(2.0), lambda: q.copy_(torch.ones(8, 8))):
        with pytest.raises(RecipeError, match="scale or a seed"):
            write()
    assert same_bits(q, kept)


def test_copy_between_usages():
    x = torch.randn(20, 40)
    exact = Float8BlockQuantizer(block_scaling_dim=2)
    target = exact.make_empty((20, 40), columnwise=True)
    assert same_bits(
        target.copy_(quantize(x, exact)), quantize(x, exact, rowwise=True, columnwise=True)
    )
    target = MXFP8Quantizer().make_empty((20, 40), columnwise=True)
    with pytest.raises(RecipeError, match="col data"):
        target.copy_(quantize(x, MXFP8Quantizer()))
    with pytest.raises(ShapeError):
        target.copy_(torch.ones(40, 20))


def test_data_can_be_replaced_by_quantized_data_only():
    a, b = (quantize(torch.randn(4, 4), MXFP8Quantizer()) for _ in range(2))
    a.data = b
    assert same_bits(a, b)
    assert a.data.rowwise is b.rowwise
    with pytest.raises(RecipeError, match=r"copy_\(\)"):
        a.data = torch.ones(4, 4)


def test_nothing_to_hold_is_refused():
    with pytest.raises(RecipeError):
        quantize(torch.ones(3), MXFP8Quantizer(), rowwise=False)


@every
@usages
def test_flattening_for_compilers(quantizer, rowwise, columnwise):
    q = make(torch.randn(20, 40), quantizer, rowwise=rowwise, columnwise=columnwise)
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    assert len(inner) == len(parts(q))
    hash(context)
    assert same_bits(QuantizedTensor.__tensor_unflatten__(inner, context, q.shape, q.stride()), q)
    with pytest.raises(AttributeError):
        _ = q.rowwise_data


@every
@usages
def test_values_are_made_inside_a_compiled_function(quantizer, rowwise, columnwise):
    """Traced values know no table of ours: one that is looked up must be part of the trace."""
    q = make(torch.randn(20, 48), quantizer, rowwise=rowwise, columnwise=columnwise)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda q: 2 * q, backend="eager")(q), 2 * q)


@pytest.mark.parametrize("quantizer", [MXFP8Quantizer(), NVFP4Quantizer(with_rht=True)], ids=str)
def test_values_are_made_ahead_of_time_too(quantizer):
    q = quantize(torch.randn(20, 48), quantizer, rowwise=False, columnwise=True)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda q: 2 * q, backend="aot_eager")(q), 2 * q)


def test_functions_of_single_values():
    q = quantize(torch.randn(4, 32), MXFP8Quantizer())
    want = quantize(q.dequantize().neg(), MXFP8Quantizer())
    assert q.apply_(lambda x: -x) is q
    assert same_bits(q, want)


def test_saved_for_backward_and_inference():
    x = torch.randn(8, 8, requires_grad=True)
    q = quantize(x, MXFP8Quantizer())
    (q * q).sum().backward()  # autograd saves the quantized tensor itself
    assert torch.equal(x.grad, 2 * q.detach().dequantize())
    with torch.inference_mode():
        assert quantize(x, MXFP8Quantizer()).dequantize().shape == (8, 8)


def test_col_only_hybrid_dequantizes_its_own_format():
    hybrid = HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer())
    x = torch.randn(16, 16)
    q = quantize(x, hybrid, rowwise=False, columnwise=True)
    assert torch.equal(
        q.dequantize(), quantize(x, NVFP4Quantizer(), rowwise=False, columnwise=True).dequantize()
    )


@pytest.mark.parametrize(
    ("x", "quantizer", "extra", "match"),
    [
        ([1.0, 2.0], MXFP8Quantizer(), {}, "takes a tensor"),
        (torch.ones(16, 16), NVFP4Quantizer(stochastic_rounding=True), {"seed": 3}, "seed"),
        (torch.ones(16, 16), Float8Quantizer(), {"state": 2.0}, "state"),
    ],
)
def test_quantize_refuses_what_is_no_tensor(x, quantizer, extra, match):
    with pytest.raises(RecipeError, match=match):
        quantize(x, quantizer, **extra)
