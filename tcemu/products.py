"""Products of any size, as libraries compute them; the common ones stand at the root of tcemu."""

from tcemu.operations.products.attention.flash_blocks import Flash as Flash
from tcemu.operations.products.complex_products import complex_matmul as complex_matmul
from tcemu.operations.products.delayed_scaling import DelayedScaling as DelayedScaling
from tcemu.operations.products.delayed_scaling import delayed_matmul as delayed_matmul
from tcemu.operations.products.ozaki import OzakiModularRecipe as OzakiModularRecipe
from tcemu.operations.products.ozaki import OzakiSliceRecipe as OzakiSliceRecipe
from tcemu.operations.products.ozaki import get_ozaki_recipe as get_ozaki_recipe
from tcemu.operations.products.ozaki import ozaki_matmul as ozaki_matmul
from tcemu.operations.products.ozaki import ozaki_matmul_codes as ozaki_matmul_codes
from tcemu.operations.products.wide import WideRecipe as WideRecipe
from tcemu.operations.products.wide import get_wide_recipe as get_wide_recipe
