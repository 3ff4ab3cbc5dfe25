"""Import-only stand-in: on CPU the engine takes its own rotary embedding."""
