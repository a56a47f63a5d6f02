"""Quantisation to narrow formats: operands of a product with their scales, and the block formats MX and NVFP4."""
