"""Hybrid models under uniform names."""
