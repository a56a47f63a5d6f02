"""Pictures of layouts as SVG text, and of results by matplotlib."""
