"""PTX files run without a GPU, bit for bit."""
