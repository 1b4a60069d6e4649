"""The epilogue of a spec, as hooks of quack's GEMM classes: its arithmetic, and on Hopper the loop over subtiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import DStore
from quack.rounding import RoundingMode

from te_ops.backends.cutlass.spec import (
    Epilogue,
    Format,
    GemmSpec,
    Load,
    Rebuilt,
    main_output,
)
from te_ops.backends.cutlass.stores import ColumnSum, QuantStore

TYPES: dict[str, Any] = {
    "fp32": Float32,
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
    "e2m1": cutlass.Float4E2M1FN,
}


class Slot(NamedTuple):
    """An argument of the epilogue.

    Attributes:
        field: of the argument tuple.
        source: which argument of the caller it is.
        op: the epilogue op that handles it.
        half: 0 or 1 if it is a half of the caller's tensor, along its last dimension.
    """

    field: str
    source: str
    op: Any
    half: int | None = None


def field_name(name: str, half: int | None) -> str:
    """The field of an argument, or of a half of it."""
    return name if half is None else f"{name}_{half}"


class FusedEpilogue(ComposableEpiMixin):  # type: ignore[misc]
    """The epilogue of a spec, as hooks of quack's GEMM classes."""

    spec: GemmSpec
    function: Any = None
    second: Any = None
    slots: tuple[Slot, ...] = ()

    def epi_to_underlying_arguments(self, args: Any, *, loc: Any = None, ip: Any = None) -> Any:
        """What reaches the device."""
        self.rounding_mode = RoundingMode.RN
        params = self._epi_ops_to_params_dict(args)
        return self.EpilogueParams(**params, split_k_semaphore=None, split_k_workspace=None)

    def permute_batch_last_epi_args(self, args: Any, append_batch_if_2d: bool = False) -> Any:
        """Takes the halves that fields stand for before quack puts a batch mode to tiles."""
        halves = {
            slot.field: _half(getattr(args, slot.field), slot.half)
            for slot in self.slots
            if slot.half is not None
        }
        return super().permute_batch_last_epi_args(args._replace(**halves), append_batch_if_2d)

    def epi_begin(self, params: Any, *rest: Any, **named: Any) -> Any:
        """Before the first subtile; ops read parameters of each other."""
        self.epilogue_params = params
        return super().epi_begin(params, *rest, **named)

    def epi_visit_subtile(self, params: Any, loads: Any, acc: Any, tRS_rC: Any = None) -> Any:
        """The arithmetic of a subtile."""
        return Subtile(self, loads, acc).outputs()


def _half(tensor: Any, half: int) -> Any:
    """A half of a tensor along its last dimension."""
    size = tensor.shape[-1] // 2
    offset = cute.assume(size * half * tensor.stride[-1], divby=8)
    layout = cute.make_layout((*tensor.shape[:-1], size), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator + offset, layout)


class HopperEpilogue(FusedEpilogue):
    """The epilogue on sm_90a, whose loop over subtiles is ours."""

    def epilogue(self, *places: Any, **named: Any) -> Any:
        """Called by quack's main loop for a tile; gives the states of the pipeline of loads."""
        return Loop(self, places, named).run()

    @property
    def copies(self) -> list[QuantStore]:
        """The ops that write FP8 copies through shared memory."""
        return [op for op in self._epi_ops if isinstance(op, QuantStore) and (op.row or op.col)]


class Loop:
    """The subtiles of one tile, as quack's main loop hands it over.

    The order differs from quack's. What a subtile writes to global memory goes last: a fence between the two ways to
    shared memory waits for a thread's writes, so it comes as long as can be after the writes before it. Without tiles
    to store there is one barrier a subtile.
    """

    def __init__(self, gemm: HopperEpilogue, places: Sequence[Any], named: dict[str, Any]) -> None:
        self.gemm = gemm
        self.params, self.shared, self.loads, self.writes, self.reading, self.loading, *rest = (
            places
        )
        self.epi_tile, self.load_acc = rest
        self.fragment, self.tiled_copy = named["tRS_rD"], named["tiled_copy_r2s"]
        self.copy_in, self.thread = named["copy_C"], named["tidx"]
        self.coord, self.varlen = named["tile_coord_mnkl"], named["varlen_manager"]
        self.barrier, self.scheduler = named["epilogue_barrier"], named["tile_scheduler"]
        self.is_tma_warp = named["is_tma_warp"]
        self.stores = gemm.epi_setup_aux_out(
            self.params, self.shared, self.tiled_copy, None, self.coord, self.varlen, self.thread
        )
        if named["copy_D"] is not None:
            main = (DStore(), None, self.tiled_copy, named["tRS_sD"], named["copy_D"], None)
            self.stores = (main, *self.stores)
        self.has_main = named["copy_D"] is not None
        order = (0, 1) if gemm.epi_m_major else (1, 0)
        layout = cute.make_ordered_layout(gemm.epi_tile_shape, order=order)
        self.subtiles = [layout.get_hier_coord(turn) for turn in range(cute.size(layout))]
        self.ahead = min(len(self.subtiles), gemm.epi_c_stage)
        self.before = self.scheduler.num_tiles_executed * len(self.subtiles)

    def run(self) -> Any:
        """Traces the loop."""
        self.tensors = self.gemm.epi_begin(
            self.params,
            self.shared,
            self.epi_tile,
            None,
            self.tiled_copy,
            self.coord,
            self.varlen,
            self.barrier,
            self.thread,
            self.fragment.layout,
        )
        self._begin()
        for turn in range(len(self.subtiles)):
            self._subtile(turn)
        self.gemm.epi_end(
            self.params,
            self.tensors,
            self.epi_tile,
            None,
            self.tiled_copy,
            self.coord,
            self.varlen,
            self.thread,
        )
        return self.reading, self.loading

    def _begin(self) -> None:
        """Starts the loads of the first subtiles."""
        if self.copy_in is not None:
            for coord in self.subtiles[: self.ahead]:
                self._start(coord)

    def _subtile(self, turn: int) -> None:
        gemm, coord = self.gemm, self.subtiles[turn]
        self.load_acc(self.fragment, coord)
        if self.copy_in is not None:
            self.loads.consumer_wait(self.reading)
            gemm.epi_tile_load_s2r(self.params, self.tensors, self.reading.index)
        seen = gemm.epi_begin_loop(self.params, self.tensors, coord)
        outs = gemm.epi_visit_subtile(self.params, seen, self.fragment)
        buffer = (self.before + turn) % gemm.epi_stage
        if self.stores:
            self._put(turn, (self.fragment, *outs) if self.has_main else outs, buffer)
        sums = self._stage_sums(coord)
        if self.stores or sums or gemm.copies:
            self.barrier.arrive_and_wait()
        if self.stores:
            self._write_tiles(buffer, coord)
        codes = [(op, op.fetch(gemm, seen[op.name])) for op in gemm.copies]
        if self.copy_in is not None:
            self._release(turn)
        for op, fetched in codes:
            op.flush(gemm, seen[op.name], fetched)
        for op, state in sums:
            op.end_loop_finish(gemm, getattr(self.params, op.name), state, self.coord, self.varlen)

    def _put(self, turn: int, outs: Sequence[Any], buffer: Any) -> None:
        """Tiles to store, into shared memory."""
        gemm = self.gemm
        pieces = [
            store[0].store_convert(gemm, out, None, self.thread, self.coord, self.before, turn)
            for store, out in zip(self.stores, outs, strict=True)
        ]
        self._wait_for_buffer()
        self.barrier.arrive_and_wait()
        for (op, _, tiled_copy, shared, *_), piece in zip(self.stores, pieces, strict=True):
            op.store_r2s(gemm, tiled_copy, piece, shared[None, None, None, buffer], self.thread)
        cute.arch.fence_view_async_shared()

    def _stage_sums(self, coord: Any) -> list[tuple[Any, Any]]:
        """The sums that a subtile completes, reduced over a warp and put into shared memory."""
        found = []
        for op in self.gemm._epi_ops:
            if not isinstance(op, ColumnSum):
                continue
            staged = op.end_loop_stage(
                self.gemm,
                getattr(self.params, op.name),
                self.tensors[op.name],
                coord,
                self.epi_tile,
                None,
                self.tiled_copy,
                self.thread,
            )
            if staged is not None:
                found.append((op, staged[1]))
        return found

    def _release(self, turn: int) -> None:
        """Gives the subtile's loads back, and starts those that take their place.

        No fence stands between what was read here and the copy engine's next write: the values have been used. It would
        wait for the thread's writes to global memory too, which take longer than a subtile.
        """
        self.loads.consumer_release(self.reading)
        self.reading.advance()
        if turn + self.ahead < len(self.subtiles):
            self._start(self.subtiles[turn + self.ahead])

    def _start(self, coord: Any) -> None:
        """Starts the loads of a subtile."""
        self._load(coord)
        self.loading.advance()

    @cute.jit
    def _load(self, coord: Any) -> None:
        if self.is_tma_warp:
            self.loads.producer_acquire(self.loading)
            self.copy_in(src_idx=coord, producer_state=self.loading)
            self.loads.producer_commit(self.loading)

    @cute.jit
    def _wait_for_buffer(self) -> None:
        if self.is_tma_warp:
            self.writes.producer_acquire()

    @cute.jit
    def _write_tiles(self, buffer: Any, coord: Any) -> None:
        """Tiles from shared to global memory."""
        if self.is_tma_warp:
            for store in self.stores:
                store[4](src_idx=buffer, dst_idx=coord)
            self.writes.producer_commit()


class Subtile:
    """The traced arithmetic of one subtile: a thread's share of it, value by value.

    The accumulator and y are lists of values per part: one part, or gate and linear.
    """

    def __init__(self, gemm: FusedEpilogue, loads: Any, acc: Any) -> None:
        self.gemm, self.loads, self.fragment = gemm, loads, acc
        self.e = gemm.spec.epilogue
        layout = acc.layout if not self.e.acc_pair else cute.recast_layout(2, 1, acc.layout)
        self.shape = layout.shape

    def outputs(self) -> tuple[Any, ...]:
        """What the stores of tiles write, in their order; the main output replaces the accumulator."""
        stored_acc, acc = self._rounded(self._scaled(), self.e.rounds_acc)
        stored, values = self._rounded(self._values(acc), self.e.rounds)
        for slot in self.gemm.slots:
            if isinstance(slot.op, ColumnSum):
                slot.op.put(self.gemm, self.loads[slot.field], values[slot.half or 0])
            elif isinstance(slot.op, QuantStore):
                made = self._rebuilt() if slot.source == "rebuilt" else values
                slot.op.put(self.gemm, self.loads[slot.field], made)
        found: list[Any] = []
        main = main_output(self.e)
        if self.e.acc_store is not None and main != "acc":
            found += stored_acc
        if self.e.store is not None and main != "y":
            found += stored
        if main is not None:
            _fill(self.fragment, (values if main == "y" else acc)[0])
        return tuple(found)

    def _scaled(self) -> list[list[Any]]:
        values = [self.fragment[i] for i in range(cute.size(self.fragment))]
        if self.gemm.spec.scaled:
            scale = self.loads["scale_a"] * self.loads["scale_b"]
            values = [value * scale for value in values]
        step = 2 if self.e.acc_pair else 1
        return [values[part::step] for part in range(step)]

    def _rounded(self, parts: list[list[Any]], kind: Format | None) -> tuple[Any, list[list[Any]]]:
        """(fragments for stores, the values in FP32), rounded to the format."""
        wide = [cute.make_rmem_tensor(self.shape, Float32) for _ in parts]
        for fragment, values in zip(wide, parts, strict=True):
            _fill(fragment, values)
        if kind is None or kind == "fp32":
            return wide, parts
        narrow = [fragment.to(TYPES[kind]) for fragment in wide]
        back = [fragment.to(Float32) for fragment in narrow]
        return narrow, [[f[i] for i in range(cute.size(f))] for f in back]

    def _values(self, acc: list[list[Any]]) -> list[list[Any]]:
        """y of the function, as parts."""
        if self.gemm.function is None:
            return acc
        results = [self.gemm.function(*self._inputs(acc, i)) for i in range(len(acc[0]))]
        if self.e.outs == 1:
            return [[Float32(result) for result in results]]
        return [[Float32(result[part]) for result in results] for part in range(2)]

    def _rebuilt(self) -> list[list[Any]]:
        """The value of the second function, as parts."""
        assert self.e.rebuilt is not None
        count = cute.size(self.fragment)
        loads = [(f"load{index}", self.e.loads[index]) for index in self.e.rebuilt.loads]
        inputs = (
            [x for name, load in loads for x in self._loaded(name, load, i)] for i in range(count)
        )
        return [[Float32(self.gemm.second(*xs)) for xs in inputs]]

    def _inputs(self, acc: list[list[Any]], i: int) -> Iterator[Any]:
        loads = iter(enumerate(self.e.loads))
        for position in range(len(self.e.loads) + 1):
            if position == self.e.acc:
                yield from (part[i] for part in acc)
            else:
                index, load = next(loads)
                yield from self._loaded(f"load{index}", load, i)

    def _loaded(self, name: str, load: Load, i: int) -> Iterator[Any]:
        if load.shape == "scalar":
            yield self.loads[name].to(Float32)
        elif self.e.acc_pair:
            yield from (self.loads[name][2 * i + part] for part in range(2 if load.pair else 1))
        else:
            for half in (0, 1) if load.pair else (None,):
                yield self.loads[field_name(name, half)][i].to(Float32)


def _fill(fragment: Any, values: list[Any]) -> None:
    for i, value in enumerate(values):
        fragment[i] = value


def function_of(source: Epilogue | Rebuilt | None) -> Any:
    """The function that a text defines; None where there is none, as for y = acc."""
    if source is None or not source.function:
        return None
    names: dict[str, Any] = {}
    exec(compile(source.text, f"<{source.function}>", "exec"), names)
    return names[source.function]
