"""`QuantizedTensor`: records that behave as a torch tensor of the source's shape and dtype.

Moves, copies, detaching, saving and views that keep the blocks whole act on the bytes, which are
never rounded a second time. Every other torch function sees the dequantized values and gives a
dense result; one that writes in place quantizes its result again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from te_ops.errors import RecipeError, ShapeError
from te_ops.quantizers.kinds import quantizer_from_dict, quantizer_to_dict
from te_ops.quantizers.record import Record, Usage

if TYPE_CHECKING:
    from te_ops.quantizers.base import Quantizer

aten = torch.ops.aten

# Attribute -> (which record, which of its tensors); the names under which compilers flatten us.
_INNER = {
    f"_{side}_{part}": (side, part)
    for side in ("rowwise", "columnwise")
    for part in ("data", "scale_inv", "amax")
}


class QuantizedTensor(Tensor):
    """A tensor held as records. Made by `te_ops.quantize`.

    Attributes:
        rowwise, columnwise: the `Record` of each usage, or ``None``.
        quantizer: what made them.
    """

    rowwise: Record | None
    columnwise: Record | None
    quantizer: Quantizer

    @staticmethod
    def __new__(
        cls,
        rowwise: Record | None,
        columnwise: Record | None,
        quantizer: Quantizer,
        *,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Wrap records of one source; `RecipeError` when both are ``None``."""
        record = rowwise if rowwise is not None else columnwise
        if record is None:
            raise RecipeError("A quantized tensor needs rowwise or columnwise data, or both.")
        self: QuantizedTensor = Tensor._make_wrapper_subclass(
            cls,
            record.shape,
            dtype=record.dtype,
            device=record.device,
            requires_grad=requires_grad,
        )
        self.rowwise, self.columnwise, self.quantizer = rowwise, columnwise, quantizer
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Act on the bytes where that is exact, else on the dequantized values."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _on_values(func, args, kwargs)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a dense tensor, in `dtype` (default: this tensor's). Its gradient passes
        through unchanged."""
        if torch.is_grad_enabled() and self.requires_grad:
            result: Tensor = _Dequantize.apply(self, dtype)  # type: ignore[no-untyped-call]
            return result
        return _values(self, dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all records."""
        return sum(record.nbytes for record in _records(self))

    @property
    def data(self) -> Tensor:
        """This tensor without autograd, over the same bytes."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            raise RecipeError(
                "Only a QuantizedTensor can become the data of one; use copy_() to quantize "
                "dense values into it."
            )
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.rowwise, self.columnwise = value.rowwise, value.columnwise
        self.quantizer = value.quantizer

    def numpy(self, *, force: bool = False) -> Any:
        """The dequantized values as a numpy array."""
        return self.dequantize().numpy(force=force)

    def share_memory_(self) -> QuantizedTensor:
        """Move the bytes to shared memory; torch's own would look for them where this tensor has none."""
        for part in _parts(self):
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def apply_(self, function: Any) -> QuantizedTensor:
        """Replace each value by `function` of it; as `share_memory_`, torch's own ends the process."""
        self.copy_(_values(self).apply_(function))
        return self

    def is_shared(self) -> bool:
        """Whether all bytes are in shared memory."""
        return all(part.is_shared() for part in _parts(self))  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """The dequantized values as nested lists."""
        return _values(self).tolist()

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        usages = "+".join(r.usage.value for r in _records(self))
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device}, {self.quantizer.describe()}, {usages}, nbytes={self.nbytes}"
            f"{', requires_grad=True' if self.requires_grad else ''})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only a quantized tensor that is a leaf of the autograd graph can be deep-copied; "
                "detach() it first."
            )
        if id(self) in memo:
            found: QuantizedTensor = memo[id(self)]
            return found
        with torch.no_grad():
            result = _mapped(self, torch.clone)
        memo[id(self)] = result.requires_grad_(self.requires_grad)
        result.__dict__.update(copy.deepcopy(_extra(self), memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        records = tuple(None if r is None else _plain(r) for r in (self.rowwise, self.columnwise))
        quantizer = quantizer_to_dict(self.quantizer)
        extra = (self.requires_grad, _extra(self))
        return rebuild_quantized_tensor, (records, quantizer, self.dtype, extra)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in _INNER if getattr(self, name) is not None]
        sides = tuple(None if r is None else r.quantizer for r in (self.rowwise, self.columnwise))
        return names, (self.quantizer, sides, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> QuantizedTensor:
        quantizer, sides, dtype = context
        row, col = (
            None
            if side is None
            else Record(
                inner[f"_{name}_data"],
                inner.get(f"_{name}_scale_inv"),
                inner.get(f"_{name}_amax"),
                side,
                usage,
                tuple(size),
                dtype,
            )
            for name, side, usage in zip(("rowwise", "columnwise"), sides, Usage, strict=True)
        )
        return QuantizedTensor(row, col, quantizer)

    def __getattr__(self, name: str) -> Any:
        # The flattened tensors, read from the records so that there is one place that holds them.
        if name in _INNER:
            side, part = _INNER[name]
            record = getattr(self, side)
            return None if record is None else getattr(record, part)
        raise AttributeError(f"QuantizedTensor has no attribute {name!r}")


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    state: Tensor | None = None,
    seed: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize `x` (any shape; FP16, BF16, FP32 or FP64). The gradient passes through unchanged.

    A tensor that this very quantizer made is not rounded again: its records are reused, a missing
    usage being their transpose where the format allows that.

    Args:
        x: the tensor.
        quantizer: the format and its scaling rule.
        rowwise, columnwise: which usages to make, at least one.
        state: the scale, one FP32 element, for a stateful quantizer.
        seed: int64 with zero dimensions, for a stochastic quantizer.
    """
    if not hasattr(quantizer, "records"):
        raise RecipeError(f"quantize: the second argument must be a quantizer, got {quantizer!r}.")
    if not isinstance(x, Tensor):
        raise RecipeError(f"quantize: takes a tensor, got a {type(x).__name__}.")
    for name, extra in (("state", state), ("seed", seed)):
        if not (extra is None or isinstance(extra, Tensor)):
            raise RecipeError(f"quantize: {name} must be a tensor, got {extra!r}.")
    if torch.is_grad_enabled() and x.requires_grad:
        result: QuantizedTensor = _Quantize.apply(  # type: ignore[no-untyped-call]
            x, quantizer, (rowwise, columnwise), (state, seed)
        )
        return result
    return _quantize(x, quantizer, (rowwise, columnwise), (state, seed))


def _quantize(
    x: Tensor,
    quantizer: Quantizer,
    usages: tuple[bool, bool],
    extra: tuple[Tensor | None, Tensor | None],
) -> QuantizedTensor:
    rowwise, columnwise = usages
    row, col = None, None
    if isinstance(x, QuantizedTensor):
        if x.quantizer == quantizer:
            row = _usage(x.rowwise, x.columnwise) if rowwise else None
            col = _usage(x.columnwise, x.rowwise) if columnwise else None
        x = _values(x)
    make_row, make_col = rowwise and row is None, columnwise and col is None
    if make_row or make_col:
        state, seed = extra
        made = quantizer.records(x, row=make_row, col=make_col, state=state, seed=seed)
        row, col = _own(made[0]) or row, _own(made[1]) or col
    return QuantizedTensor(row, col, quantizer)


def _own(record: Record | None) -> Record | None:
    """`record`, with memory of its own."""
    if record is None or not record.quantizer.aliases:
        return record
    return record.map(torch.clone)


def _usage(wanted: Record | None, other: Record | None) -> Record | None:
    """The record wanted, or its equal made from the other one's bytes, or ``None``."""
    return wanted if wanted is not None else None if other is None else other.transposed()


def rebuild_quantized_tensor(
    records: Sequence[Any],
    quantizer: dict[str, Any],
    dtype: torch.dtype,
    extra: tuple[bool, dict[str, Any]],
) -> QuantizedTensor:
    """What unpickling calls. Takes tensors and plain values only, so that
    ``torch.load(weights_only=True)`` can trust it."""
    row, col = (
        None if parts is None else _unplain(parts, usage, dtype)
        for parts, usage in zip(records, Usage, strict=True)
    )
    requires_grad, attributes = extra
    result = QuantizedTensor(row, col, quantizer_from_dict(quantizer), requires_grad=requires_grad)
    result.__dict__.update(attributes)
    return result


torch.serialization.add_safe_globals([rebuild_quantized_tensor])


class _Quantize(torch.autograd.Function):
    """Straight-through: the gradient of a rounding is taken as one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantizer: Quantizer,
        usages: tuple[bool, bool],
        extra: tuple[Tensor | None, Tensor | None],
    ) -> QuantizedTensor:
        return _quantize(x, quantizer, usages, extra)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype = q.dtype
        return _values(q, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def _parts(q: QuantizedTensor) -> list[Tensor]:
    """The tensors of all records."""
    return [part for record in _records(q) for part in record.tensors()]


def _records(q: QuantizedTensor) -> list[Record]:
    return [r for r in (q.rowwise, q.columnwise) if r is not None]


def _values(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    return _records(q)[0].dequantize(dtype)


def _extra(q: QuantizedTensor) -> dict[str, Any]:
    """Attributes that others have put on the tensor, such as the mark of a parameter."""
    ours = ("rowwise", "columnwise", "quantizer")
    return {key: value for key, value in q.__dict__.items() if key not in ours}


def _plain(record: Record) -> tuple[Any, ...]:
    """`record` for pickling. Plain pickle cannot read the one-byte float types back, so their
    bytes travel as uint8."""
    tensors = [
        None if t is None else ((t.view(torch.uint8) if t.element_size() == 1 else t), t.dtype)
        for t in (record.data, record.scale_inv, record.amax)
    ]
    return tensors, quantizer_to_dict(record.quantizer), record.shape


def _unplain(parts: Sequence[Any], usage: Usage, dtype: torch.dtype) -> Record:
    tensors, quantizer, shape = parts
    data, scale_inv, amax = (None if t is None else t[0].view(t[1]) for t in tensors)
    assert data is not None
    return Record(data, scale_inv, amax, quantizer_from_dict(quantizer), usage, tuple(shape), dtype)


def _mapped(q: QuantizedTensor, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    row, col = (None if r is None else r.map(function) for r in (q.rowwise, q.columnwise))
    return QuantizedTensor(row, col, q.quantizer)


# ---------------------------------------------------------------- torch functions on the bytes


def _alias(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.rowwise, q.columnwise, q.quantizer)


def _clone(q: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return _mapped(q, torch.clone)


def _to_copy(
    q: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> Tensor:
    """A move keeps the bytes; another dtype means dense values of it."""
    if dtype is not None and dtype is not q.dtype:
        return _values(q, dtype).to(device=device, non_blocking=non_blocking)
    target = q.device if device is None else device
    return _mapped(q, lambda t: t.to(target, non_blocking=non_blocking, copy=True))


def _empty_like(
    q: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return _new_empty(q, q.shape, dtype=dtype, device=device)


def _new_empty(
    q: QuantizedTensor,
    shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """Quantized, of the same usages; dense when another dtype is asked for."""
    device = q.device if device is None else device
    if dtype is not None and dtype is not q.dtype:
        return torch.empty(shape, dtype=dtype, device=device)
    return q.quantizer.make_empty(
        tuple(shape),
        dtype=q.dtype,
        device=device,
        rowwise=q.rowwise is not None,
        columnwise=q.columnwise is not None,
    )


def _view(q: QuantizedTensor, shape: Sequence[int]) -> Any:
    size = _resolved(tuple(shape), q.numel())
    views = [None if r is None else r.reshaped(size) for r in (q.rowwise, q.columnwise)]
    if any(v is None for v, r in zip(views, (q.rowwise, q.columnwise), strict=True) if r):
        return NotImplemented
    return QuantizedTensor(views[0], views[1], q.quantizer)


def _resolved(shape: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """`shape` with its -1, if any, worked out (by torch, with its errors)."""
    return tuple(torch.empty(numel, device="meta").view(shape).shape)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, QuantizedTensor):
        return NotImplemented
    if target.shape != source.shape:
        raise ShapeError(
            f"copy_: the source of shape {tuple(source.shape)} does not fit the quantized tensor "
            f"of shape {tuple(target.shape)}."
        )
    same = isinstance(source, QuantizedTensor) and source.quantizer == target.quantizer
    if not same:
        source = _requantized(target, source)
    assert isinstance(source, QuantizedTensor)
    pairs = (
        (target.rowwise, source.rowwise, source.columnwise),
        (target.columnwise, source.columnwise, source.rowwise),
    )
    for ours, wanted, other in pairs:
        if ours is None:
            continue
        theirs = _usage(wanted, other)
        if theirs is None:
            raise RecipeError(
                f"copy_: the source has no {ours.usage.value} data, which "
                f"{target.quantizer.describe()} cannot make from the other usage; copy its "
                "dequantize() instead."
            )
        for old, new in zip(ours.tensors(), theirs.tensors(), strict=True):
            old.copy_(new, non_blocking=non_blocking)
    return target


def _requantized(target: QuantizedTensor, source: Tensor) -> QuantizedTensor:
    """Dense `source` through the quantizer of `target`, in its dtype and on its device."""
    _check_writable(target)
    dense = _values(source) if isinstance(source, QuantizedTensor) else source
    dense = dense.to(device=target.device, dtype=target.dtype)
    usages = (target.rowwise is not None, target.columnwise is not None)
    return _quantize(dense, target.quantizer, usages, (None, None))


def _check_writable(q: QuantizedTensor) -> None:
    if q.quantizer.stateful or q.quantizer.stochastic:
        raise RecipeError(
            f"Cannot write dense values into a tensor of {q.quantizer.describe()}, which needs a "
            "scale or a seed to quantize; call te_ops.quantize and copy_() its result."
        )


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
    aten.new_empty.default: _new_empty,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.copy_.default: _copy_,
}

# ------------------------------------------------------------------- torch functions on the values

# These read the shape and dtype of their input, never its values.
_READS_NO_VALUES = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[QuantizedTensor]:
    """The quantized tensors that `func` writes, by its schema."""
    values: Iterable[tuple[Any, Any]] = (
        (a, args[i] if i < len(args) else kwargs.get(a.name))
        for i, a in enumerate(func._schema.arguments)
    )
    return [
        leaf
        for argument, value in values
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, QuantizedTensor)
    ]


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = _written(func, args, kwargs)
    for q in written:
        _check_writable(q)
    dense: dict[int, Tensor] = {}

    def unwrap(value: Any) -> Any:
        if not isinstance(value, QuantizedTensor):
            return value
        if id(value) not in dense:
            dense[id(value)] = (
                torch.empty(value.shape, dtype=value.dtype, device=value.device)
                if func in _READS_NO_VALUES
                else _values(value)
            )
        return dense[id(value)]

    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    for q in written:
        q.copy_(dense[id(q)])
    back = {id(dense[id(q)]): q for q in written}
    return tree_map(lambda value: back.get(id(value), value), result)
