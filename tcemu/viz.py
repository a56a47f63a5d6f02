"""Pictures of layouts as SVG text, and of results by matplotlib."""

from tcemu.uses.viz.layout_pictures import operands as operands
from tcemu.uses.viz.layout_pictures import page as page
from tcemu.uses.viz.layout_pictures import svg as svg
from tcemu.uses.viz.result_plots import plot as plot
