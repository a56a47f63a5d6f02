"""PTX's tensor-core instructions: their fields and spelling, and the targets that have them."""
