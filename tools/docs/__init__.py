"""Generated pages and pictures of the documentation site, and the list of words not to use."""
