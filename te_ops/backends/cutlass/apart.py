"""Hopper kernels whose epilogue is made by warps of its own (`Tiling.apart`).

Two warp groups multiply tile after tile. At a tile's end they leave the accumulators in shared memory and go on; a
third group makes the epilogue meanwhile. So the product does not wait for the epilogue's memory and arithmetic, and its
threads need registers for accumulators only: where sums are split they hold two of each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass as _cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warpgroup
from quack.gemm_base import NamedBarrierGemm
from quack.pipeline import make_pipeline_state

from te_ops.backends.cutlass import ptx
from te_ops.backends.cutlass.epilogue import HopperEpilogue, Loop
from te_ops.backends.cutlass.stores import OCTET, QuantStore, Stash

cutlass: Any = _cutlass  # most of its names come by a star
GROUP = 128  # threads of a warp group
MATH_GROUPS = 2
GROUPS = MATH_GROUPS + 1
HALF = 64  # rows of a tile that a math group holds
WIDTH = 32  # columns of a subtile

# Named barriers: of quack's those that it uses for pingpong.
FULL, EMPTY = int(NamedBarrierGemm.MmaWG0), int(NamedBarrierGemm.MmaWG1)  # the stash
TURN = int(
    NamedBarrierGemm.EpiWG0
)  # of the first math group to issue; the next one is the second's


class Product(NamedTuple):
    """What quack's loop over tiles hands over for the product of one.

    Attributes:
        operands, state: their pipeline.
        multiply: starts the products of a stage.
        wave: their accumulators.
        total: the sum of waves.
        count: K tiles.
        group: the warp group.
    """

    operands: Any
    state: Any
    multiply: Any
    wave: Any
    total: Any
    count: Any
    group: Any


class StashedQuantStore(QuantStore):
    """Copies whose codes pass through the part of the stash in which the subtile's accumulators lay."""

    def _total_bytes(self, epi_tile: Any) -> int:
        return 0

    def _place(self, gemm: Any, state: Any, epi_coord: Any, part: int) -> Any:
        copies = (self.row + self.col) * self._copy_bytes(gemm.epi_tile)
        return gemm.place(int(epi_coord[0]), epi_coord[1]) + part * copies


class ApartEpilogue(HopperEpilogue):
    """Shares a tile's work among warp groups: two multiply, the third has the epilogue.

    All three go through quack's loop over tiles. Each of its hooks does a group's own part, so the groups meet only
    where the stash changes hands.
    """

    epi_c_stage_base = 2  # loads are a tile ahead: the memory is better spent on operands

    def divide(self) -> None:
        """After quack's constructor: who does what. The epilogue's sizes are those of one warp group."""
        self.mma_warp_groups = GROUPS
        self.threads_per_cta = (GROUPS + 1) * GROUP
        self.ab_load_warp_id = GROUPS * 4
        self.num_epi_warps = 4
        self.epilogue_barrier = pipeline.NamedBarrier(
            barrier_id=int(NamedBarrierGemm.Epilogue), num_threads=GROUP
        )
        # Of the 512 registers that a lane has over the four groups.
        self.num_regs_load, self.num_regs_mma = 32, 160

    def _setup_attributes(self, epilogue_args: Any) -> None:
        super()._setup_attributes(epilogue_args)
        self.sched_stage = 2  # the epilogue is a tile behind

    def _compute_tile_shape_or_override(
        self, cta_tile_shape_mnk: Any, atom_layout_mnk: Any, *rest: Any
    ) -> Any:
        return super()._compute_tile_shape_or_override(cta_tile_shape_mnk, (1, 1, 1), *rest)

    def epi_smem_warp_shape_mnk(self) -> Any:
        """Warps of the epilogue along each dimension."""
        return (4, 1, 1)

    def epi_get_smem_tensors(self, params: Any, storage: Any) -> Any:
        """Before the loop over tiles. Keeps where the stash begins, and gives the first math group the first turn."""
        tensors = super().epi_get_smem_tensors(params, storage)
        self.stash = Int32(tensors["stash"].iterator.toint())
        self._open()
        return tensors

    @cute.jit
    def _open(self) -> None:
        if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP) == 1:
            _arrive(TURN, MATH_GROUPS)

    def epilog_smem_store_and_partition(self, tiled_mma: Any, *rest: Any) -> Any:
        """The fragment of a subtile as one warp group holds it."""
        one = cute.make_tiled_mma(cute.make_mma_atom(tiled_mma.op), (1, 1, 1))
        *places, thread = rest
        return super().epilog_smem_store_and_partition(one, *places, thread % GROUP)

    def epi_retile_acc(self, acc: Any, fragment: Any, tiled_copy: Any) -> Any:
        """Nothing: the epilogue reads the stash."""
        return None

    # -- the math groups

    def mma(self, *places: Any) -> Any:
        """Called by quack's loop for a tile, in all groups; gives the state of the operands' pipeline."""
        return self._mma(Product(*places))

    @cute.jit
    def _mma(self, work: Product) -> Any:
        """A tile's product, into the stash; in the third group, leave to write there."""
        state, wave, total, group = work.state, work.wave, work.total, work.group
        if group < MATH_GROUPS:
            wave.fill(0.0)  # says that nothing outlives a tile: the epilogue has its registers
            state = self._sum(work)
            _wait(EMPTY, GROUPS)
            place = self.place(group, 0) + ptx.thread_index() % GROUP * 16
            Stash.put(place, [total[i] for i in range(cute.size(total))])
            _arrive(FULL, GROUPS)
        else:
            _arrive(EMPTY, GROUPS)
        return state

    @cute.jit
    def _sum(self, work: Product) -> Any:
        """Sums over the K tiles, split. The groups start products in turn: while one adds, the tensor cores have the
        other's."""
        operands, state, multiply, wave, total, count, group = work
        release, ready = state.clone(), Boolean(True)
        total.fill(0.0)
        if count > 0:
            ready = operands.consumer_try_wait(state)
        for tile in cutlass.range(count, unroll=1):
            operands.consumer_wait(state, ready)
            _wait(TURN + group, MATH_GROUPS)
            multiply(A_idx=state.index, B_idx=state.index, zero_init=Boolean(True))
            _arrive(TURN + 1 - group, MATH_GROUPS)
            state.advance()
            ready = Boolean(True)
            if tile + 1 < count:
                ready = operands.consumer_try_wait(state)
            warpgroup.wait_group(0)
            operands.consumer_release(release)
            release.advance()
            total.store(total.load() + wave.load())
        return state

    def place(self, half: Any, column: Any) -> Any:
        """Where the accumulators of a subtile begin: of a math group's half of the tile, and of its columns."""
        size = HALF * 4 * self.cta_tile_shape_mnk[1]
        return self.stash + (half * size + int(column) * WIDTH // 8 * OCTET)

    # -- the third group

    def epilogue(self, *places: Any, **named: Any) -> Any:
        """Called by quack's loop for a tile, in all groups."""
        self._epilogue(places, named)
        return places[4], places[5]

    @cute.jit
    def _epilogue(self, places: Any, named: Any) -> None:
        if cute.arch.make_warp_uniform(named["tidx"] // GROUP) == MATH_GROUPS:
            self._run(places, named)

    def _run(self, places: Any, named: Any) -> None:
        thread = ptx.thread_index()
        first = cute.arch.make_warp_uniform(thread // 32) == 4 * MATH_GROUPS
        mine = {**named, "tidx": thread % GROUP, "is_tma_warp": first}
        states = [self._state(named, user) for user in ("Consumer", "Producer")]
        loop = ApartLoop(self, (*places[:4], *states, places[6], self._load), mine)
        loop.run()
        if loop.stores:
            self._drain(loop.writes, first)

    def _state(self, named: dict[str, Any], user: str) -> Any:
        """Where the pipeline of loads is. It follows from the tiles before, so that no group carries it along."""
        if named["copy_C"] is None:
            return None
        state = make_pipeline_state(getattr(pipeline.PipelineUserType, user), self.epi_c_stage)
        tiles = named["tile_scheduler"].num_tiles_executed
        state.advance_iters(tiles * cute.size(self.epi_tile_shape))
        return state

    @cute.jit
    def _drain(self, writes: Any, first: Any) -> None:
        """Waits for the tile's stores: at the end of the kernel, quack waits for those of another warp."""
        if first:
            writes.producer_tail()

    def _load(self, fragment: Any, coord: Any) -> None:
        place = self.place(int(coord[0]), coord[1]) + ptx.thread_index() % GROUP * 16
        for i, value in enumerate(Stash.get(place, cute.size(fragment))):
            fragment[i] = value
        if any(isinstance(op, StashedQuantStore) for op in self.copies):
            self.epilogue_barrier.arrive_and_wait()  # codes take the place of what was read


class ApartLoop(Loop):
    """The subtiles of one tile; what they load is on its way before the tile is there."""

    def _begin(self) -> None:
        super()._begin()
        _wait(FULL, GROUPS)


def _wait(barrier: Any, groups: int) -> None:
    cute.arch.barrier(barrier_id=barrier, number_of_threads=groups * GROUP)


def _arrive(barrier: Any, groups: int) -> None:
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=groups * GROUP)
