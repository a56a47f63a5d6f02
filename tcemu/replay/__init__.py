"""Replay: how a library multiplies, found by probes and computed again bit for bit."""
