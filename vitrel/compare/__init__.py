"""Comparisons: several models and seeds of one configuration, each trained and then evaluated together."""
