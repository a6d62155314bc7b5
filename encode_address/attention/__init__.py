"""Attention edited by phase: what is run inside traces (`forward`), what is done (`arms`), and rows of it (`measured`)."""
