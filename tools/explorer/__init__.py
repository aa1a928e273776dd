"""explorer.html: small examples of attention with position, to be changed in any browser without a network.

Nothing here is installed with the package: `python -m tools.explorer` writes the page.
"""
