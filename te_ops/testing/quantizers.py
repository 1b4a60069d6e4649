"""check_quantizer: a number format keeps its own promises."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.errors import RecipeError
from te_ops.quantizers import Quantizer, Record, Usage, quantize
from te_ops.quantizers.kinds import quantizer_from_dict
from te_ops.testing.cases import SHAPES, expanded, strided, transposed
from te_ops.testing.close import assert_close, assert_equal, unit_roundoff, values
from te_ops.testing.outcome import context, seeded

_USAGES = ((Usage.ROW, "row"), (Usage.COL, "col"))
_BIG = (256, 256)


def check_quantizer(
    quantizer: Quantizer,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    device: torch.device | str | None = None,
    bound: float | None = None,
    idempotent: bool = False,
    seed: int = 0,
) -> None:
    """Check a quantizer's records in both usages.

    * Shapes and dtypes of the bytes are those of `layout`; usage, shape, dtype and quantizer of a
      record are right; the input is neither written nor aliased; strided, transposed and expanded
      inputs give the same bytes; both usages together give what each alone gives; `transposed()`
      gives the other usage's bytes where promised.
    * The values: the relative error is at most `bound` in norm; a single number in a block of zeros
      comes back within 0.1 % (any format represents its largest code exactly); zeros stay zeros;
      NaN never becomes a number, Inf keeps its sign and is not NaN, subnormal and very large
      numbers stay finite and near.
    * Seeds: the same one gives the same bytes, others give others, and their mean nears the input.
    * A value: hashable, equal to its pickle and to `quantizer_from_dict(to_dict())`; a stateful one
      refuses to work without state.

    Args:
        quantizer: what to check. A stateful one is given the scale 1.
        shapes: of inputs.
        dtypes: of inputs.
        device: where the inputs are.
        bound: largest relative error in norm; default: the unit roundoff of the data's dtype (twice
            that if stochastic), which a round-to-nearest format with fitting scales keeps.
        idempotent: quantizing dequantized values must give the same values.
        seed: of all random numbers.

    Raises:
        AssertionError: which promise is broken, for which shape and usage.
    """
    name = quantizer.describe()
    if not isinstance(name, str) or not name:
        raise AssertionError(
            f"describe() of {type(quantizer).__name__} gives {name!r}, not a few words"
        )
    job = _Job(quantizer, torch.device(device or "cpu"), bound, seed)
    with context(name):
        _check_value(quantizer)
        for dtype in dtypes:
            for shape in shapes:
                with context(f"shape {shape}, {str(dtype).removeprefix('torch.')}"):
                    job.check_bytes(job.random(shape, dtype))
            with context(f"{str(dtype).removeprefix('torch.')}"):
                job.check_values(dtype, idempotent)
                job.check_special(dtype)
        job.check_seeds()


class _Job:
    def __init__(
        self, quantizer: Quantizer, device: torch.device, bound: float | None, seed: int
    ) -> None:
        self.quantizer = quantizer
        self.device = device
        self.bound = bound
        self.seed = seed

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with seeded(self.seed + len(shape) + sum(shape)):
            return torch.randn(shape).to(self.device, dtype)

    def records(
        self, x: torch.Tensor, *, row: bool = True, col: bool = True, seed: int = 17
    ) -> Any:
        """(row, col, amax) with the state and seed that the quantizer needs."""
        q = self.quantizer
        state = torch.ones(1, device=x.device) if q.stateful else None
        dither = torch.tensor(seed, device=x.device) if q.stochastic else None
        made = q.records(x, row=row, col=col, state=state, seed=dither)
        if not isinstance(made, tuple) or len(made) != 3:
            raise AssertionError(
                f"records() returned {type(made).__name__}; it must return (row, col, amax)"
            )
        return made

    # -- bytes

    def check_bytes(self, x: torch.Tensor) -> None:
        """Layout, metadata, purity, and the same bytes however they are asked for."""
        before = x.clone()
        both = self.records(x)
        assert_equal(x, before, name="the input afterwards (it may not be written)")
        amax = both[2]
        if (
            not isinstance(amax, torch.Tensor)
            or amax.shape != ()
            or amax.dtype is not torch.float32
        ):
            raise AssertionError(f"the amax is {amax!r}; it must be FP32 with zero dimensions")
        for (usage, name), record in zip(_USAGES, both[:2], strict=True):
            with context(name):
                self._check_record(record, usage, x)
                alone = self.records(x, row=usage is Usage.ROW, col=usage is Usage.COL)
                if alone[1 if usage is Usage.ROW else 0] is not None:
                    raise AssertionError("a usage that was not asked for is made")
                assert_equal(alone[0 if usage is Usage.ROW else 1], record, name="made alone")
        self._check_transposed(both)
        if x.dim() >= 2 and x.numel():
            for arrange in (strided, transposed, expanded):
                with context(f"{arrange.__name__} input"):
                    laid = arrange(x)
                    assert_equal(
                        self.records(laid)[:2], self.records(laid.contiguous())[:2], name="records"
                    )

    def _check_record(self, record: Any, usage: Usage, x: torch.Tensor) -> None:
        if not isinstance(record, Record):
            raise AssertionError(
                f"records() gave a {type(record).__name__} for a usage that was asked for"
            )
        found = tuple((tuple(t.shape), t.dtype) for t in record.tensors())
        stated = tuple(
            (tuple(s), d) for s, d in self.quantizer.layout(tuple(x.shape), usage, x.dtype)
        )
        if found != stated:
            raise AssertionError(f"its tensors are {found}, layout() says {stated}")
        wanted = (usage, tuple(x.shape), x.dtype, self.quantizer.of_usage(usage))
        if (record.usage, tuple(record.shape), record.dtype, record.quantizer) != wanted:
            raise AssertionError(f"usage, shape, dtype and quantizer of {record} are not {wanted}")
        y = record.dequantize()
        if tuple(y.shape) != tuple(x.shape) or y.dtype is not x.dtype:
            raise AssertionError(
                f"it dequantizes to {tuple(y.shape)} {y.dtype}, the source is {tuple(x.shape)} "
                f"{x.dtype}"
            )
        if not record.quantizer.aliases and any(_shares(t, x) for t in record.tensors()):
            raise AssertionError("it shares memory with the input (set aliases = True if it may)")

    def _check_transposed(self, both: Any) -> None:
        """Row and col from the same bytes where `exact_other_usage` promises it."""
        for record, other in ((both[0], both[1]), (both[1], both[0])):
            made = record.transposed()
            if (made is not None) != self.quantizer.of_usage(record.usage).exact_other_usage():
                raise AssertionError("transposed() and exact_other_usage() do not agree")
            if made is not None and self.quantizer.exact_other_usage():
                assert_equal(made, other, name=f"the transposed {record.usage.value} record")
                assert_equal(made.dequantize(), record.dequantize(), name="its values")

    # -- values

    def check_values(self, dtype: torch.dtype, idempotent: bool) -> None:
        """Error in norm; single numbers; the values of a QuantizedTensor; a second round trip."""
        x = self.random(_BIG, dtype)
        spread = x * 2.0 ** (torch.arange(_BIG[1], device=x.device) // 128 * 3).to(dtype)
        lone = torch.zeros(_BIG, dtype=dtype, device=x.device)
        lone[::128, ::128] = torch.tensor([[1.0, -2.0], [0.5, 1.0]], dtype=dtype, device=x.device)
        if self.quantizer.stateful or not self._scales_by_block():
            lone[lone != 0] = 1.0
        for record in self.records(lone)[:2]:
            got = record.dequantize(torch.float32)
            with context(f"single numbers among zeros, {record.usage.value}"):
                assert_close(got, lone.float(), rtol=1e-3, atol=1e-6, name="dequantized")
        for case, given in (("random numbers", x), ("a spread of magnitudes", spread)):
            for record in self.records(given)[:2]:
                with context(f"{case}, {record.usage.value}"):
                    self._check_error(record, given)
        for record in self.records(torch.zeros(_BIG, dtype=dtype, device=x.device))[:2]:
            if bool((record.dequantize() != 0).any()):
                raise AssertionError(f"zeros do not stay zeros, {record.usage.value}")
        if idempotent:
            for record in self.records(x)[:2]:
                once = record.dequantize(torch.float32)
                again = self.records(once)[0 if record.usage is Usage.ROW else 1].dequantize(
                    torch.float32
                )
                assert_equal(again, once, name=f"a second round trip, {record.usage.value}")
        self._check_tensor(x)

    def _scales_by_block(self) -> bool:
        """Whether numbers of different magnitude in distant blocks both come back exactly (more
        than one scale).
        """
        for usage, _ in _USAGES:
            parts = self.quantizer.layout(_BIG, usage)
            if len(parts) < 2 or math.prod(parts[1][0]) < 4:
                return False
        return True

    def _check_error(self, record: Record, x: torch.Tensor) -> None:
        limit = self.bound
        if limit is None:
            limit = unit_roundoff(record.data.dtype) * (1 + record.quantizer.stochastic)
            limit = limit or 2.0**-5  # integers: uniform steps of amax / 127
        got, wanted = record.dequantize(torch.float32).double(), x.double()
        if not bool(got.isfinite().all()):
            raise AssertionError("finite numbers dequantize to NaN or Inf")
        error = float((got - wanted).norm() / wanted.norm())
        if error > limit + unit_roundoff(torch.float32):
            raise AssertionError(
                f"the relative error is {error:.4g} in norm; {limit:.4g} is allowed (bound=)"
            )

    def _check_tensor(self, x: torch.Tensor) -> None:
        """`te.quantize` holds these very records, and does not round its own values again."""
        options = {
            "state": torch.ones(1, device=x.device) if self.quantizer.stateful else None,
            "seed": torch.tensor(17, device=x.device) if self.quantizer.stochastic else None,
        }
        q = quantize(x, self.quantizer, rowwise=True, columnwise=True, **options)
        row, col, _ = self.records(x)
        assert_equal((q.rowwise, q.columnwise), (row, col), name="records of te.quantize")
        again = quantize(q, self.quantizer, rowwise=True, columnwise=True, **options)
        assert_equal((again.rowwise, again.columnwise), (row, col), name="records quantized again")

    # -- special numbers

    def check_special(self, dtype: torch.dtype) -> None:
        """NaN, infinities, signed zeros, subnormals, numbers near overflow."""
        big = (
            1e37 if dtype is not torch.float16 else 6e4
        )  # a power-of-two scale may round 3e38 to infinity
        rows: dict[str, float] = {
            "nan": math.nan,
            "inf": math.inf,
            "-inf": -math.inf,
            "tiny": 1e-40,
            "big": big,
        }
        for name, value in rows.items():
            x = self.random(_BIG, dtype)
            if name in ("tiny", "big"):
                x = x.sign() * value
            x[0, 0] = x[200, 131] = value
            for record in self.records(x)[:2]:
                with context(f"{name}, {record.usage.value}"):
                    _check_special(
                        record.dequantize(torch.float32), x, name, stateful=self.quantizer.stateful
                    )
        zero = torch.tensor([[0.0, -0.0]], dtype=dtype, device=self.device)
        for record in self.records(zero)[:2]:
            if bool(record.dequantize().any()):
                raise AssertionError("0 and -0 do not dequantize to zero")

    # -- seeds

    def check_seeds(self) -> None:
        """Reproducible, different, unbiased; or no seed at all."""
        x = self.random(_BIG, torch.float32)
        first = self.records(x, seed=3)
        assert_equal(self.records(x, seed=3)[:2], first[:2], name="the same seed again")
        for i, (usage, name) in enumerate(_USAGES):
            if not self.quantizer.of_usage(usage).stochastic:
                continue
            trials = [values(self.records(x, seed=s)[i]) for s in range(16)]
            if all(torch.equal(t, trials[0]) for t in trials[1:]):
                raise AssertionError(f"every seed gives the same values, {name}")
            single = float((trials[0] - x).norm())
            mean = float((torch.stack(trials).mean(0) - x).norm())
            if mean > single / 2:  # a quarter of it, were they independent and exactly unbiased
                raise AssertionError(
                    f"{name}: the mean over 16 seeds errs by {mean:.3g}, a single one by "
                    f"{single:.3g}: it is biased"
                )


def _check_special(got: torch.Tensor, x: torch.Tensor, name: str, *, stateful: bool) -> None:
    places = ((0, 0), (200, 131))
    if name == "nan":
        hidden = [at for at in places if not math.isnan(float(got[at]))]
        if hidden:
            raise AssertionError(f"NaN at {hidden[0]} dequantizes to {float(got[hidden[0]]):.6g}")
        return
    if name in ("inf", "-inf"):
        for at in places:
            value = float(got[at])
            if math.isnan(value) or (value > 0) != (name == "inf"):
                raise AssertionError(f"{name} at {at} dequantizes to {value:.6g}")
        return
    if not bool(got.isfinite().all()):
        raise AssertionError(
            f"numbers of magnitude {float(x.abs().max()):.3g} dequantize to NaN or Inf"
        )
    if name == "big" and not stateful and not bool((got.sign() == x.float().sign()).all()):
        raise AssertionError("large numbers lose their sign")
    if not stateful and float(got.abs().max()) > 4 * float(x.abs().max()):
        raise AssertionError(
            f"numbers of magnitude {float(x.abs().max()):.3g} dequantize to up to "
            f"{float(got.abs().max()):.3g}"
        )


def _check_value(quantizer: Quantizer) -> None:
    """A frozen, hashable, printable value that survives its dictionary and pickle."""
    plain = quantizer.to_dict()
    if quantizer_from_dict(plain) != quantizer:
        raise AssertionError(
            f"quantizer_from_dict(to_dict()) gives {quantizer_from_dict(plain)!r}, not "
            f"{quantizer!r}"
        )
    kind = type(quantizer)
    importable = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    if importable and pickle.loads(pickle.dumps(quantizer)) != quantizer:
        raise AssertionError("its pickle is not equal to it")
    hash(quantizer)
    if quantizer.stateful:
        try:
            quantizer.records(torch.ones(2, 2), row=True, col=False)
        except RecipeError:
            return
        raise AssertionError("it is stateful, and yet works without state")


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.numel()) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
