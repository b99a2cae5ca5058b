"""Plug-ins of a user's own, as tests name them by dotted module."""
