"""Pictures of layouts as SVG text. Results that have a picture have a method `plot`."""

from tcemu.uses.viz.layout_pictures import operands as operands
from tcemu.uses.viz.layout_pictures import page as page
from tcemu.uses.viz.layout_pictures import svg as svg
