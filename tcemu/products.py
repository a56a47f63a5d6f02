"""Products of any size, as libraries compute them; the common ones stand at the root of tcemu."""

from typing import TYPE_CHECKING

from tcemu.base.lazy_names import lazy_names

if TYPE_CHECKING:
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

PUBLIC_NAMES = (
    ("tcemu.operations.products.attention.flash_blocks", "Flash"),
    ("tcemu.operations.products.complex_products", "complex_matmul"),
    ("tcemu.operations.products.delayed_scaling", "DelayedScaling delayed_matmul"),
    ("tcemu.operations.products.ozaki", "OzakiModularRecipe OzakiSliceRecipe get_ozaki_recipe ozaki_matmul ozaki_matmul_codes"),
    ("tcemu.operations.products.wide", "WideRecipe get_wide_recipe"),
)

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC_NAMES)
