"""Products of any size, as libraries compute them; the common ones stand at the root of tcemu."""
