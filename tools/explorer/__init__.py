"""explorer.html: a page on which position can be tried out, with sliders, in any browser and without a network.

Nothing here is installed with the package: `python -m tools.explorer` writes the page.
"""
