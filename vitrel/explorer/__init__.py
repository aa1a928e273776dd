"""explorer.html: a page on which position can be tried out, with sliders, in any browser and without a network."""
