"""What fills the tables and pictures of docs/ with the results of the evaluations.

Nothing here is installed with the package: it makes the pages of this repository.
"""
