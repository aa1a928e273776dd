"""Generated pages and pictures of the documentation site."""
