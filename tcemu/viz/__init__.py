"""Pictures of layouts as SVG text, and of results by matplotlib."""

from tcemu.viz.layout_pictures import operands as operands
from tcemu.viz.layout_pictures import page as page
from tcemu.viz.layout_pictures import svg as svg
from tcemu.viz.result_plots import plot as plot
