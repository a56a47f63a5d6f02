"""Pictures of tensor memory: where tcgen05 puts the rows and columns of D, drawn from the rows of `tcemu.engine.layouts.tensor_memory`."""

import numpy as np

from tcemu.engine.isa.tcgen05 import Tcgen05Product
from tcemu.engine.layouts.tensor_memory import LANES, accumulator_cells, accumulator_layout
from tcemu.uses.viz.svg_drawing import Block, Cell, Grid, draw_grid, draw_paragraph, stack_blocks

LANE_BLOCK = 16  # lanes of one drawn cell: the largest unit that every layout keeps together
COLUMN_BLOCKS = 8  # drawn cells along the columns, at most


def accumulator_picture(op: Tcgen05Product) -> Block:
    """Draw where D lies: for each CTA the lanes from top to bottom, the columns from left to right.

    Args:
        op: Product.
    """
    layout = accumulator_layout(op.m, op.cta_group, ws=op.ws, sparse=op.sparse)
    cells = accumulator_cells(layout, op.n)
    used = op.n // layout.parts
    width = max(1, used // COLUMN_BLOCKS)
    # the row and the column of D in each cell of a CTA; -1 where nothing of D lies
    r, c = np.full((2, op.cta_group, LANES, used), -1)
    rows, columns = np.indices((op.m, op.n))
    r[cells.cta, cells.lane, cells.column], c[cells.cta, cells.lane, cells.column] = rows, columns
    grids = []
    for cta in range(op.cta_group):
        drawn = []
        for i, j in np.ndindex(LANES // LANE_BLOCK, -(-used // width)):
            block = np.s_[cta, i * LANE_BLOCK : (i + 1) * LANE_BLOCK, j * width : (j + 1) * width]
            if (r[block] < 0).any():
                continue
            text = (f"m {r[block].min()}-{r[block].max()}", f"n {c[block].min()}-{c[block].max()}")
            drawn.append(Cell(i, j, frozenset(), int(r[block].min()) // LANE_BLOCK % 32, text))
        lanes = tuple(f"lanes {i}-{i + LANE_BLOCK - 1}" for i in range(0, LANES, LANE_BLOCK))
        heads = tuple(str(j) if width == 1 else f"{j}-{min(j + width, used) - 1}" for j in range(0, used, width))
        title = "D in tensor memory" + (f", CTA {cta} of the pair" if op.cta_group == 2 else "")
        grids.append(Grid(title, lanes, heads, tuple(drawn)))
    legend = [f"Layout {layout.name}. m: rows of D, n: columns. Columns of tensor memory count from D's address.", "PTX ISA 9.7.16.10.5"]
    return stack_blocks([draw_paragraph(legend), *map(draw_grid, grids)], 12)
