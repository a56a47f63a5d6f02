"""Any JAX function with its matrix products emulated: the policies, the rewriting of its program, the report, the comparison."""
