"""Scripts that write the tables and pictures of docs/ from the results of evaluations; not installed with the package."""
