"""The order in which a library's kernel adds, found by probes and computed again bit for bit on any machine.

`fingerprint` probes a black box and returns a `KernelRecipe`, or the reason why there is none. `tcemu.matmul` computes by a recipe. `dumps`
and `loads` write and read recipes as JSON. `find_divergence` finds the first sum in which two recipes differ. `get_kernel_recipe` returns
recipes that were measured on a GPU, `list_profiles` lists the measurements, and `library_policy` applies them in `tcemu.emulate` by shape.
Both predict the order of other shapes on request, with its probability. `find_order_changes` finds at which numbers of rows the order of a
layer changes.
"""
