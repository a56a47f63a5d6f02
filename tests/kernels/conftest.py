"""Puts this folder on the import path, as pytest does for every `conftest.py`: tests import `triton_kernels` from here."""
