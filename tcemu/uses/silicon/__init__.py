"""The same instruction on a real GPU: its PTX kernel, assembled by the driver and run on the words that the emulation takes."""
