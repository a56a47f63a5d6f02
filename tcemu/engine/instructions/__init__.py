"""The instructions as functions on registers and memory; the common ones stand at the root of tcemu."""
