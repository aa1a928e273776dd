"""Pages and pictures of the documentation site that are generated from the code: encodings, command line, configurations."""
