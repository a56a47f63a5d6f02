"""Pictures of layouts as SVG text, drawn from the layout rows: which lane holds which element, and what lies where in shared memory.

And, with matplotlib, of results."""

from tcemu.viz.errors import plot as plot
from tcemu.viz.pictures import operands as operands
from tcemu.viz.pictures import page as page
from tcemu.viz.pictures import svg as svg
