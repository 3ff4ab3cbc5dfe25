"""Adapters: they turn the plugins' broadcast points into hooks of a real engine, which they import lazily."""
