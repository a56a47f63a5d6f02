"""Backends: who computes an instruction or a product, on which device. All give the same bits."""

from tcemu.engine.backends.dispatch import describe as describe
