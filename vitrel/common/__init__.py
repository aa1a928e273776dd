"""What every room may use: files, image sizes, names, YAML, progress, optional packages, how a command ends, this machine.

Nothing here knows of position, attention or models, and no module imports another part of the package.
"""
